"""The text of a PDF, as a process of its own: the PDF comes in on stdin, its text goes out on stdout.

Its last line on stderr says why where it ends with 1.
"""

import contextlib
import io
import sys

MAX_MEMORY_BYTES = 4 << 30


def main() -> int:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    _limit_memory()
    try:
        reader = PdfReader(io.BytesIO(sys.stdin.buffer.read()))
        if reader.is_encrypted and not reader.decrypt(""):
            print("it asks for a password", file=sys.stderr)
            return 1
        text = "\n\n".join(page.extract_text() for page in reader.pages)
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        print(f"{error or type(error).__name__}", file=sys.stderr)  # a broken PDF meets any of these inside pypdf
        return 1
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    return 0


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit; nor have some containers
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


if __name__ == "__main__":
    sys.exit(main())
