"""Files that are whole or not there: one way to replace a file, one to read rows, one store that survives a crash."""

import csv
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout


class FileFormatError(ValueError):
    """A file that cannot be read as what it should be; the message names file, line and remedy."""


class InUseError(ValueError):
    """Another process works in the same folder."""


def looks_like_path(source: str) -> bool:
    """Whether a name can only be that of a file, there or not, and not that of something on the hub."""
    return Path(source).suffix.lower() in (".json", ".jsonl", ".csv", ".parquet") or source.startswith((".", "/", "~"))


def check_local(source: str | Path | None, **of_hub: str | None) -> None:
    """Raise `ValueError` for the first option of the hub that is set for what lies here, where nothing reads it."""
    for name, value in of_hub.items():
        if value and source and os.path.exists(source):
            raise ValueError(f"`{name}` {value!r} is for the hub, and {str(source)!r} lies here; leave it out.")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end of the block."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Replace a file by `text`, see [`replacing`]."""
    with replacing(path) as temporary:
        # A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON reads back.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def write_json(path: str | Path, value: Any) -> None:
    """Replace a file by `value` as JSON, see [`replacing`]."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a JSONL file, see [`replacing`]."""
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def read_object(path: str | Path, remedy: str) -> dict[str, Any]:
    """A JSON object from a file. Raises `ValueError` with `remedy` for anything else."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{str(path)!r} is not whole JSON (cut off, perhaps); {remedy}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} holds a JSON {type(value).__name__}, not an object; {remedy}.")
    return value


def json_object(setting: str, text: str | None, example: str) -> dict[str, Any]:
    """A setting that is a JSON object, empty for `None`. Raises `ValueError` without the text, which may hold a key."""

    def refuse(constant: str) -> None:
        raise ValueError  # NaN and its kin, which are Python's alone

    try:
        fields = json.loads("{}" if text is None else text, parse_constant=refuse)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"`{setting}` is no JSON object; give one such as '{example}'.")
    return fields


class _SettingsLoader(yaml.SafeLoader):
    """Refuses a name that stands twice, of which the first would be lost; a date is text, as JSON has none."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        names = set()
        for name, _ in node.value:
            if str(name.value) in names:
                raise yaml.YAMLError(f"`{name.value}` stands twice, again in line {name.start_mark.line + 1}")
            names.add(str(name.value))
        return node


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of settings. Raises `ValueError` when there is none, or it holds something else."""
    try:
        found = yaml.load(Path(path).read_text(encoding="utf-8"), _SettingsLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"{str(path)!r} cannot be read ({reason}); name a YAML file of settings.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} holds no settings; write lines such as `name: value`.")
    return found


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read a JSONL file. Raises [`FileFormatError`] naming the line that is not a JSON object."""
    return list(iterate_jsonl(path))


def iterate_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """[`read_jsonl`] line by line, for files that may be larger than memory."""
    # Bytes, so that a line in another encoding can be named; a byte order mark at the start is read over.
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                raise FileFormatError(f"{path}, line {number} is not UTF-8 text; is it a JSONL file?") from None
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", None) or str(error).splitlines()[0]
                raise FileFormatError(f"{path}, line {number} is not JSON ({reason}); mend or drop it.") from None
            if not isinstance(record, dict):
                raise FileFormatError(f"{path}, line {number} holds a {type(record).__name__}, not a JSON object.")
            yield record


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a Parquet, CSV or JSONL file or a JSON array; cells of a CSV file are text, or `None`."""
    suffix = Path(path).suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowException as error:
            raise FileFormatError(f"{path} is no Parquet file ({str(error).splitlines()[0]}).") from None
    if suffix == ".csv":
        return read_csv(path)
    with open(path, "rb") as file:
        if not file.read(1_000).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            return read_jsonl(path)
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} begins like a JSON array and is none ({str(error).splitlines()[0]}).") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise FileFormatError(f"{path}: element {number} is a {type(row).__name__}, not a JSON object.")
    return rows


def read_csv(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a CSV file, whose cells are text, or `None`. Raises [`FileFormatError`]."""
    csv.field_size_limit(2**31 - 1)  # a problem with a figure in it may be longer than Python's 128 KiB
    rows = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row:
                    raise FileFormatError(f"{path}, line {reader.line_num} has more cells than the first line.")
                rows.append({name: cell or None for name, cell in row.items()})
    except UnicodeDecodeError:
        raise FileFormatError(f"{path} is not UTF-8 text; save it so.") from None
    except csv.Error as error:
        raise FileFormatError(f"{path}, line {reader.line_num} is not CSV ({error}); mend or drop it.") from None
    return rows


@contextmanager
def alone_in(lock_file: str | Path, where: str) -> Iterator[None]:
    """Keep a second process out, kill -9 included; `where` is what the user set, for the message."""
    lock = FileLock(lock_file, timeout=0)
    try:
        Path(lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise InUseError(f"{where} is in use by another run; wait for it to end, or give another folder.") from None
    except OSError as error:
        raise ValueError(f"{where} cannot be written ({error.strerror}); give a folder to write in.") from None
    try:
        yield
    finally:
        lock.release()


class JsonlStore:
    """A JSONL file that only grows, written by one process: an entry is on disk when `append` returns. On opening,
    `on_entry` is told place and content of what is there, and a half-written last line is cut off. Raises `OSError`."""

    def __init__(self, path: str | Path, on_entry: Callable[[tuple[int, int], dict[str, Any]], None] | None = None):
        self.path = Path(path)
        # Bytes cut off on opening; whole lines that are no JSON objects, which are left and passed over.
        self.dropped = self.unreadable = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = 0
        with open(self.path, "rb") as lines:
            for line in lines:
                entry = parse_line(line)
                if not line.endswith(b"\n"):
                    if entry is None:
                        self.dropped = len(line)
                        os.ftruncate(self._file, self.size)
                        break
                    # Only the line's end is missing, the entry is whole.
                    os.write(self._file, b"\n")
                    line += b"\n"
                self.unreadable += entry is None
                if entry is not None and on_entry:
                    on_entry((self.size, len(line)), entry)
                self.size += len(line)
        os.fsync(self._file)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)  # the file's name must survive a power cut as well as its contents
        os.close(folder)

    def append(self, entries: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
        """Put entries on disk, all or none, and return place and length of each. Raises `OSError` with the name of the
        file."""
        # ASCII only: a lone surrogate in an entry would otherwise be an entry that cannot be stored.
        lines = [json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n" for entry in entries]
        try:
            view = memoryview(b"".join(lines))
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
            # What goes into a file that was deleted is lost when this process ends.
            if not os.path.samestat(os.stat(self.path), os.fstat(self._file)):
                raise FileNotFoundError(errno.ENOENT, "Replaced by another file")
        except OSError as error:
            os.ftruncate(self._file, self.size)  # half a line here would spoil the next one
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        places = []
        for line in lines:
            places.append((self.size, len(line)))
            self.size += len(line)
        return places

    def get(self, place: tuple[int, int]) -> dict[str, Any]:
        """The entry at a place."""
        start, length = place
        return json.loads(os.pread(self._file, length, start))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_entries(path: str | Path) -> Iterator[dict[str, Any]]:
    """The readable entries of a [`JsonlStore`], which may be open; none without a file."""
    if Path(path).is_file():
        with open(path, "rb") as lines:  # line by line: such a file may be larger than memory
            yield from (entry for entry in map(parse_line, lines) if entry is not None)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; `None` for anything else."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
