from headrace.placement.local.footprint import Footprint

MIB = 1 << 20


def test_memory_is_given_back_once_large_batches_have_stopped() -> None:
    footprint = Footprint(10.0)
    footprint.ran(64 * MIB)
    assert not footprint.look(9.0)
    footprint.ran(4 * MIB)
    assert footprint.look(1.0)
    footprint.ran(4 * MIB)
    assert not footprint.look(100.0)


def test_memory_is_kept_while_batches_of_about_the_size_come() -> None:
    footprint = Footprint(10.0)
    footprint.ran(64 * MIB)
    for _ in range(5):
        assert not footprint.look(9.0)
        footprint.ran(32 * MIB)
    assert not footprint.look(9.0)
    assert footprint.look(1.0)


def test_small_batches_are_not_worth_it() -> None:
    footprint = Footprint(10.0)
    footprint.ran(MIB)
    assert not footprint.look(100.0)


def test_memory_given_back_otherwise_is_forgotten() -> None:
    footprint = Footprint(10.0)
    footprint.ran(64 * MIB)
    footprint.forget()
    assert not footprint.look(100.0)
