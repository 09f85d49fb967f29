"""An OpenAI-compatible server: ``specbeam serve`` (docs/server.md). It needs the extra ``server``."""
