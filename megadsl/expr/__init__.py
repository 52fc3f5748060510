"""Expression text: parsed to ir.expr trees, printed back, printed as C++."""

from megadsl.expr.parser import parse
from megadsl.expr.printer import decimal, to_cuda, to_text

__all__ = ["decimal", "parse", "to_cuda", "to_text"]
