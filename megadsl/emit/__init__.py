"""Plan to CUDA text. The only place that knows jinja2."""

from megadsl.emit.kernel import emit

__all__ = ["emit"]
