"""Names of parameters that the server itself gives requests; those of clients cannot have them."""

# A front end has the headers, and the engine's process what needs one: its value travels as a
# parameter with this in front of its name.
HEADER_PARAMETER = "headrace_header:"
# The same for a header that goes on to another server, which requests bring along to where their
# calls are made; and until when their client waits, in nanoseconds of the monotonic clock.
FORWARD_PARAMETER = "headrace_forward:"
DEADLINE_PARAMETER = "headrace_deadline"
