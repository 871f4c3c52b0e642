"""Which line of the user's code an operation or an error comes from."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import TracebackType

import torch

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parent.parent
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.+)')


def line_of_traceback(trace: TracebackType | None) -> str:
    """The innermost line outside torch and Ravnest, as ``file:line: code``; empty if none."""
    frames = [f for f in traceback.extract_tb(trace) if _is_users(f.filename)]
    return _describe(frames[-1]) if frames else ""


def line_of_stack() -> str:
    """The innermost line outside torch and Ravnest of the running code."""
    frames = [f for f in traceback.extract_stack() if _is_users(f.filename)]
    return _describe(frames[-1]) if frames else ""


def line_of_trace_text(text: str | None) -> str:
    """The same for the text that export keeps with each operation."""
    frames = [m for m in _FRAME.finditer(text or "") if _is_users(m["file"])]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last['file']}:{last['line']}: {last['code'].strip()}"


def _describe(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"


def _is_users(filename: str) -> bool:
    path = Path(filename)
    return not (path.is_relative_to(_TORCH) or path.is_relative_to(_OURS) or filename.startswith("<"))
