"""Tool calls: models' formats for them, the grammars that enforce these formats, and their readers."""

from specbeam.structured.tools.formats import ToolFormat as ToolFormat
from specbeam.structured.tools.formats import format_of as format_of
