"""Coverage-guided fuzzing of the files that people give specbeam: see docs/exactness.md, Fuzzing and soak.

Each harness is one file with ``seeds()``, the inputs to begin with, and ``run(data)``, which gives specbeam an input.
``run`` returns, or raises SpecbeamError. Everything else is a finding. ``mutate(data, longest, seed)``, if a harness
has it, changes an input as data of its format; otherwise bytes are changed.
"""
