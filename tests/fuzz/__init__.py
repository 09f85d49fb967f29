"""Coverage-guided fuzzing of the files that people give specbeam: see docs/exactness.md, Fuzzing and soak.

Each harness is one file with ``seeds()``, the inputs to begin with, and ``run(data)``, which gives specbeam an input.
``run`` returns, or raises SpecbeamError. Everything else is a finding. ``mutate(data, longest, seed)``, if a harness
has it, changes an input as data of its format. Where it returns None, bytes are changed.
"""

HARNESSES = (
    "gguf_file",
    "folder_config",
    "tokenizer_files",
    "native_tokenizer",
    "safetensors_index",
    "safetensors_header",
    "ctranslate2_file",
    "batch_rows",
    "prompts_file",
    "study_data",
    "study_config",
    "trie_outputs",
)
