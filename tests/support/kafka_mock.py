"""librdkafka's mock cluster as a process: prints its address, then obeys lines of its input.

`down` and `up` end and restore all connections. It has no isolation: records of a transaction can
be read, and stay, whether it is committed or not; offsets are committed at once.
"""

import ctypes
import sys
from pathlib import Path

import confluent_kafka

BROKERS, PARTITIONS = 3, 4
_PRODUCER = 0


def main(topics: list[str]) -> None:
    """Serve until the input ends."""
    folder = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    [path] = folder.glob("librdkafka*.so*")
    library = ctypes.CDLL(str(path))
    for name in ("conf_new", "new", "mock_cluster_new", "mock_cluster_bootstraps"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    error = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    client = library.rd_kafka_new(_PRODUCER, conf, error, ctypes.c_size_t(len(error)))
    if not client:
        sys.exit(error.value.decode())
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(ctypes.c_void_p(client), BROKERS))
    for topic in topics:
        library.rd_kafka_mock_topic_create(cluster, topic.encode(), PARTITIONS, BROKERS)
    found = ctypes.c_char_p(library.rd_kafka_mock_cluster_bootstraps(cluster)).value
    assert found is not None
    print(found.decode(), flush=True)
    for line in sys.stdin:
        change = getattr(library, f"rd_kafka_mock_broker_set_{line.strip()}")
        for broker in range(1, BROKERS + 1):
            change(cluster, broker)
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
