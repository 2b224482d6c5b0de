import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import ConfigError, VersionError
from weightwire.wire.commands import COMPUTE_COMMANDS, Command
from weightwire.wire.dialect import DIALECTS, described_version, dialect_for

VERSIONS = ["1.0", "2.0", "3.0", "3.5", "3.6", "4.0", "5.0", "5.1", "6.0", "7.0", "8.0"]

NUMBERS = {
    "ALLOC_BUFFER": 0,
    "GET_ALIGNMENT": 1,
    "GET_MAX_SIZE": 2,
    "BUFFER_GET_BASE": 3,
    "FREE_BUFFER": 4,
    "BUFFER_CLEAR": 5,
    "SET_TENSOR": 6,
    "SET_TENSOR_HASH": 7,
    "GET_TENSOR": 8,
    "COPY_TENSOR": 9,
    "GRAPH_COMPUTE": 10,
    "GET_DEVICE_MEMORY": 11,
    "INIT_TENSOR": 12,
    "GET_ALLOC_SIZE": 13,
    "HELLO": 14,
    "DEVICE_COUNT": 15,
    "GRAPH_RECOMPUTE": 16,
    "MEMSET_TENSOR": 17,
    "SET_TENSOR_2D": 18,
    "GET_TENSOR_2D": 19,
    "COMM_INIT": 20,
    "COMM_ALLREDUCE": 21,
    "COMM_FREE": 22,
}

# Columns as in VERSIONS; "-" where the version has no such command (docs/protocol.md, sections 4 and 5).
# Least request payload in bytes.
REQUESTS = """
ALLOC_BUFFER        8    8   12   12   12   12   12   12   12   12   12
GET_ALIGNMENT       0    0    4    4    4    4    4    4    4    4    4
GET_MAX_SIZE        0    0    4    4    4    4    4    4    4    4    4
BUFFER_GET_BASE     8    8    8    8    8    8    8    8    8    8    8
FREE_BUFFER         8    8    8    8    8    8    8    8    8    8    8
BUFFER_CLEAR        9    9    9    9    9    9    9    9    9    9    9
SET_TENSOR        304  304  304  304  304  304  304  304  304  305  305
SET_TENSOR_HASH   312  312  312  312  312  312  312  312  312  312  312
GET_TENSOR        312  312  312  312  312  312  312  312  312  312  312
COPY_TENSOR       592  592  592  592  592  592  592  592  592  592  592
GRAPH_COMPUTE       8    8   12   12   12   12   12   12   12   12   20
GET_DEVICE_MEMORY   0    0    4    4    4    4    4    4    4    4    4
INIT_TENSOR       296  296  296  296  296  296  296  296  296  296  296
GET_ALLOC_SIZE    296  296  300  300 3260 3260 3260 3260 3260 3260 3260
HELLO               0    0    0    0    0   24   24   24   24   24   24
DEVICE_COUNT        -    -    0    0    0    0    0    0    0    0    0
GRAPH_RECOMPUTE     -    -    -    4    4    4    4    4    4    4   12
MEMSET_TENSOR       -    -    -    -    -    -  313  313  313  313  313
SET_TENSOR_2D       -    -    -    -    -    -    -    -    -    -  328
GET_TENSOR_2D       -    -    -    -    -    -    -    -    -    -  328
COMM_INIT           -    -    -    -    -    -    -    -    -    -   80
COMM_ALLREDUCE      -    -    -    -    -    -    -    -    -    -  300
COMM_FREE           -    -    -    -    -    -    -    -    -    -    4
"""

# Answer payload in bytes; "." is no answer, "v" one whose size the request decides.
ANSWERS = """
ALLOC_BUFFER       16   16   16   16   16   16   16   16   16   16   16
GET_ALIGNMENT       8    8    8    8    8    8    8    8    8    8    8
GET_MAX_SIZE        8    8    8    8    8    8    8    8    8    8    8
BUFFER_GET_BASE     8    8    8    8    8    8    8    8    8    8    8
FREE_BUFFER         0    0    0    0    0    0    0    0    .    .    .
BUFFER_CLEAR        0    0    0    0    0    0    0    0    .    .    .
SET_TENSOR          0    .    .    .    .    .    .    .    .    .    .
SET_TENSOR_HASH     1    1    1    1    1    1    1    1    1    1    1
GET_TENSOR          v    v    v    v    v    v    v    v    v    v    v
COPY_TENSOR         1    1    1    1    1    1    1    1    1    1    1
GRAPH_COMPUTE       1    1    1    .    .    .    .    .    .    .    .
GET_DEVICE_MEMORY  16   16   16   16   16   16   16   16   16   16   16
INIT_TENSOR         0    0    0    0    0    0    0    0    .    .    .
GET_ALLOC_SIZE      8    8    8    8    8    8    8    8    8    8    8
HELLO               3    3    3    3    3   28   28   28   28   28   28
DEVICE_COUNT        -    -    4    4    4    4    4    4    4    4    4
GRAPH_RECOMPUTE     -    -    -    .    .    .    .    .    .    .    .
MEMSET_TENSOR       -    -    -    -    -    -    0    0    .    .    .
SET_TENSOR_2D       -    -    -    -    -    -    -    -    -    -    .
GET_TENSOR_2D       -    -    -    -    -    -    -    -    -    -    v
COMM_INIT           -    -    -    -    -    -    -    -    -    -    1
COMM_ALLREDUCE      -    -    -    -    -    -    -    -    -    -    .
COMM_FREE           -    -    -    -    -    -    -    -    -    -    .
"""

# The same for what is no command.
FACTS = """
hello_request_bytes       0    0    0    0    0   24   24   24   24   24   24
hello_answer_bytes        3    3    3    3    3   28   28   28   28   28   28
hello_flags               0    0    0    0    0    1    1    1    1    1    1
device_prefix             0    0    1    1    1    1    1    1    1    1    1
device_count              0    0    1    1    1    1    1    1    1    1    1
set_tensor_header_bytes 304  304  304  304  304  304  304  304  304  305  305
cache_flag                0    0    0    0    0    0    0    0    0    1    1
alloc_size_sources        0    0    0    0    1    1    1    1    1    1    1
graph_uid                 0    0    0    0    0    0    0    0    0    0    1
rdma                      0    0    0    0    0    1    1    1    1    1    1
"""


def cells(table: str) -> list[tuple[str, str, str]]:
    """(version, row, cell) of every cell."""
    found = []
    for line in table.strip().splitlines():
        row, *values = line.split()
        assert len(values) == len(VERSIONS), row
        found += [(version, row, value) for version, value in zip(VERSIONS, values, strict=True)]
    return found


def test_versions_in_order() -> None:
    assert [dialect.text for dialect in DIALECTS.values()] == VERSIONS
    assert all(dialect.version == version for version, dialect in DIALECTS.items())


def test_command_numbers() -> None:
    assert {command.name: command.value for command in Command} == NUMBERS


@pytest.mark.parametrize(("version", "row", "cell"), cells(FACTS))
def test_facts(version: str, row: str, cell: str) -> None:
    assert int(getattr(dialect_for(version), row)) == int(cell)


@pytest.mark.parametrize(("version", "row", "cell"), cells(REQUESTS))
def test_requests(version: str, row: str, cell: str) -> None:
    dialect, number = dialect_for(version), NUMBERS[row]
    assert (number in dialect.commands) is (cell != "-")
    if cell == "-":
        for call in (dialect.request_bytes, dialect.min_request_bytes, dialect.answered, dialect.answer_bytes):
            with pytest.raises(ConfigError, match=f"protocol {version} has no command {number}"):
                call(number)
        assert dialect.name_of(number) == f"command {number}"
        return
    variable = row in {"SET_TENSOR", "SET_TENSOR_2D", "GRAPH_COMPUTE"}
    assert dialect.min_request_bytes(number) == int(cell)
    assert dialect.request_bytes(number) == (None if variable else int(cell))
    assert dialect.name_of(number) == row


@pytest.mark.parametrize(("version", "row", "cell"), cells(ANSWERS))
def test_answers(version: str, row: str, cell: str) -> None:
    dialect, number = dialect_for(version), NUMBERS[row]
    if cell == "-":
        assert number not in dialect.commands
        return
    assert dialect.answered(number) is (cell != ".")
    if cell == ".":
        with pytest.raises(ConfigError, match=f"{row} has no answer in protocol {version}"):
            dialect.answer_bytes(number)
    else:
        assert dialect.answer_bytes(number) == (None if cell == "v" else int(cell))


def test_the_tables_of_this_file_cover_every_command() -> None:
    for table in (REQUESTS, ANSWERS):
        assert {row for _, row, _ in cells(table)} == set(NUMBERS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("number", [18, 23, 99, 0xE0, 255, -1, 10**6])
def test_numbers_without_a_command(version: str, number: int) -> None:
    if (version, number) == ("8.0", 18):
        return
    dialect = dialect_for(version)
    assert dialect.name_of(number) == f"command {number}"
    with pytest.raises(ConfigError, match=f"no command {number}"):
        dialect.answered(number)


def test_compute_commands() -> None:
    expected = {"GRAPH_COMPUTE", "GRAPH_RECOMPUTE", "COMM_INIT", "COMM_ALLREDUCE", "COMM_FREE"}
    assert {command.name for command in COMPUTE_COMMANDS} == expected


MIB = 1 << 20


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("nbytes", "flag", "by_size", "by_flag"),
    [
        (10 * MIB, 0, False, False),
        (10 * MIB, 1, False, True),
        (10 * MIB + 1, 0, True, False),
        (10 * MIB + 1, 1, True, True),
        (0, 255, False, True),
        (2**63, 0, True, False),
    ],
)
def test_saves_to_cache(version: str, nbytes: int, flag: int, by_size: bool, by_flag: bool) -> None:
    assert dialect_for(version).saves_to_cache(nbytes, flag) is (by_flag if version in {"7.0", "8.0"} else by_size)


@pytest.mark.parametrize(
    ("code", "first"),
    [(0, "1.0"), (12, "1.0"), (39, "3.0"), (40, "4.0"), (41, "4.0"), (42, "5.0"), (43, None), (4, None)],
)
def test_types_a_version_knows(code: int, first: str | None) -> None:
    known = [version for version in VERSIONS if dialect_for(version).knows_type(code)]
    assert known == ([] if first is None else VERSIONS[VERSIONS.index(first) :])


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("7.0.0", "7.0"),
        ("7.0", "7.0"),
        ("7", "7.0"),
        ((7, 0, 0), "7.0"),
        ((7, 3), "7.0"),
        ([7, 3, 255], "7.0"),
        ((1, 0), "1.0"),
        ((1, 9), "1.0"),
        ((2, 255), "2.0"),
        ((3, 0), "3.0"),
        ((3, 4), "3.0"),
        ((3, 5), "3.5"),
        ((3, 6, 1), "3.6"),
        ((3, 7), "3.6"),
        ((4, 0, 3), "4.0"),
        ((5, 0, 1), "5.0"),
        ((5, 1), "5.1"),
        ((5, 2), "5.1"),
        ((6, 0, 4), "6.0"),
        ((8, 0, 0), "8.0"),
        ((8, 200), "8.0"),
    ],
)
def test_lookup(asked: tuple[int, ...] | str, found: str) -> None:
    assert dialect_for(asked).text == found


@pytest.mark.parametrize(
    ("asked", "theirs"),
    [((0, 0, 0), "0.0.0"), ((0,), "0"), ((9, 0), "9.0"), ((107, 1, 2), "107.1.2"), ("108.0", "108.0"), ("0", "0")],
)
def test_unknown_majors(asked: tuple[int, ...] | str, theirs: str) -> None:
    with pytest.raises(VersionError) as caught:
        dialect_for(asked)
    assert (caught.value.ours, caught.value.theirs) == ("1.0 to 8.0", theirs)
    assert theirs in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "asked", ["", "seven", "7.", ".7", "7.0.0.0", "-7", "7,0", " 7", "v7", "٧", "9" * 10, (), (-1,), (7, -1)]
)
def test_what_is_no_version(asked: tuple[int, ...] | str) -> None:
    with pytest.raises(ConfigError, match="no protocol version"):
        dialect_for(asked)


@given(st.lists(st.integers(0, 2**70), min_size=1, max_size=4))
def test_lookup_gives_the_newest_one_not_newer(asked: list[int]) -> None:
    major, minor = (*asked, 0)[:2]
    fitting = [text for text in VERSIONS if text.startswith(f"{major}.") and int(text[2:]) <= minor]
    if fitting:
        assert dialect_for(asked).text == fitting[-1]
    else:
        with pytest.raises(VersionError):
            dialect_for(asked)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("suffix", "patch"), [("", 0), (".0", 0), (".7", 7), (".255", 255)])
def test_a_version_a_user_may_name(version: str, suffix: str, patch: int) -> None:
    assert described_version(version + suffix) == (DIALECTS[tuple(map(int, version.split(".")))], patch)  # type: ignore[index]


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("7.1", "not known"),
        ("7.999", "not known"),
        ("8.9", "not known"),
        ("3.1.0", "not known"),
        ("0.5", "not known"),
        ("9.0.0", "not known"),
        ("8.0.256", "at most 255"),
        ("8.0.300", "at most 255"),
        ("7", "not a version"),
        ("seven", "not a version"),
        ("", "not a version"),
        ("7.0.0.0", "not a version"),
        (" 7.0", "not a version"),
        ("٧.0", "not a version"),
        (7, "not a version"),
        (7.0, "not a version"),
        (None, "not a version"),
        ((7, 0), "not a version"),
        (b"7.0", "not a version"),
    ],
)
def test_versions_a_user_may_not_name(version: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        described_version(version)
    assert not isinstance(caught.value, VersionError)
