"""Between texts and token ids: tokenizers, detokenizing, chat templates and control tokens."""
