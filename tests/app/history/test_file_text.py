"""A file becomes its whole text or a refusal that says why."""

import io

import pytest
from pypdf import PdfWriter

from app.errors import AppError
from app.history import file_text
from app.history.file_text import MAX_CHARS, MAX_FILE_BYTES, prompt_text, text_of


def _pdf(content: bytes) -> bytes:
    """A PDF of one page that draws this content; written by hand, as the format describes it."""
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    page = b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /Font << /F 5 0 R >> >> /MediaBox [0 0 9 9] >>"
    stream = b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content)
    bodies = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", page, stream, font]
    file, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % len(file)
    return file + b"xref\n0 6\n0000000000 65535 f \n" + table + end


_WORDS = b"BT /F 12 Tf (Words in a PDF) Tj ET"


def test_text_of_any_kind_is_read_whole() -> None:
    assert text_of("a.py", b"print(1)\r\nprint(2)\n") == ("text", "print(1)\nprint(2)\n")
    assert text_of("a.txt", "\ufeffgrün".encode()) == ("text", "grün")
    for encoding in ("utf-16", "utf-32"):
        assert text_of("a.txt", "grün 你好".encode(encoding)) == ("text", "grün 你好")


def test_a_pdf_gives_its_text() -> None:
    kind, text = text_of("paper.pdf", _pdf(_WORDS))
    assert (kind, text.strip()) == ("pdf", "Words in a PDF")


def _with_password() -> bytes:
    writer = PdfWriter(clone_from=io.BytesIO(_pdf(_WORDS)))
    writer.encrypt("secret", algorithm="RC4-128")
    body = io.BytesIO()
    writer.write(body)
    return body.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 415, "no text"),
        (b" \n", 415, "no text"),
        (b"\x89PNG\r\n\x1a\n\0\0", 415, "UTF-8"),
        (b"a\0b", 415, "zero bytes"),
        ("grün".encode("latin-1"), 415, "byte 2"),
        (b"x" * (MAX_FILE_BYTES + 1), 413, "at most 32 MB"),
        (b"x" * (MAX_CHARS + 1), 413, "2,000,001 characters"),
        (_pdf(b""), 415, "no text"),
        (_with_password(), 422, "password"),
        (b"%PDF-1.4\nnothing more", 422, "could not be read as a PDF"),
    ],
)
def test_what_cannot_be_read_whole_is_refused(body: bytes, status: int, told: str) -> None:
    with pytest.raises(AppError, match=told) as caught:
        text_of("file", body)
    assert caught.value.status == status


def test_a_pdf_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_text, "PDF_TIMEOUT_S", 0.001)
    with pytest.raises(AppError, match="within"):
        text_of("paper.pdf", _pdf(_WORDS))


def test_the_model_reads_files_in_fences_that_they_cannot_end() -> None:
    assert prompt_text("Explain", []) == "Explain"
    assert prompt_text("Explain", [("a.py", "x = 1\n"), ("b.md", "````\n```")]) == (
        "File: a.py\n```py\nx = 1\n```\n\nFile: b.md\n`````md\n````\n```\n`````\n\nExplain"
    )
