-- Sends the requests in the files named on the command line, in turn, and prints what came of them
-- as one line of JSON. Latencies are in microseconds.

local requests = {}
local turn = 0

function init(args)
    for _, path in ipairs(args) do
        local file = assert(io.open(path, "rb"))
        requests[#requests + 1] = file:read("*a")
        file:close()
    end
end

function request()
    turn = turn % #requests + 1
    return requests[turn]
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format(
        '\n{"answers": %d, "micros": %d, "p50": %d, "p99": %d, "p999": %d, "connect": %d,'
            .. ' "read": %d, "write": %d, "status": %d, "timeout": %d}\n',
        summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
        latency:percentile(99.9), errors.connect, errors.read, errors.write, errors.status,
        errors.timeout
    ))
end
