"""Find the line of the user's code that an operation or an error comes from."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

_TORCH = Path(torch.__file__).parent
_OURS = Path(__file__).parent.parent
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.+)')


def line_of_traceback(trace: TracebackType | None) -> str:
    """Return the innermost line outside torch and Ravnest as ``file:line: code``; empty if none."""
    frames = [f for f in traceback.extract_tb(trace) if is_user_code(f.filename)]
    return _describe(frames[-1]) if frames else ""


def code_of_traceback(trace: TracebackType | None) -> str:
    """Return the lines of torch's code in a traceback; they distinguish some errors."""
    return "\n".join(f.line or "" for f in traceback.extract_tb(trace) if _is_torch_code(f.filename))


def modules_of_traceback(trace: TracebackType | None) -> Iterator[nn.Module]:
    """Yield the modules whose code is in a traceback, the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(trace))):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner


def line_of_stack() -> str:
    """Return the innermost line outside torch and Ravnest of the current stack."""
    frames = [f for f in traceback.extract_stack() if is_user_code(f.filename)]
    return _describe(frames[-1]) if frames else ""


def line_of_trace_text(text: str | None) -> str:
    """Return the innermost user line from the stack trace that export stores with each operation."""
    frames = [m for m in _FRAME.finditer(text or "") if is_user_code(m["file"])]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last['file']}:{last['line']}: {last['code'].strip()}"


def _describe(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"


def is_user_code(filename: str) -> bool:
    """Return True for a file that belongs neither to torch nor to Ravnest."""
    path = Path(filename)
    return not (_is_torch_code(filename) or path.is_relative_to(_OURS) or filename.startswith("<"))


def _is_torch_code(filename: str) -> bool:
    return Path(filename).is_relative_to(_TORCH)
