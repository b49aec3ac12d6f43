"""The planted bugs of mutations.py can be planted; whether the tests notice them, it tells when it is run."""

import mutations


def test_every_piece_is_found_once() -> None:
    for m in mutations.MUTATIONS:
        source = (mutations.ROOT / "jax_paged" / m.file).read_text(encoding="utf-8")
        assert source.count(m.old) == 1, f"{m.file}: {m.why}"


def test_the_tests_that_have_to_notice_are_there() -> None:
    for name in {name for m in mutations.MUTATIONS for name in mutations.tests_of(m)}:
        assert (mutations.ROOT / "tests" / f"{name}.py").is_file(), name
