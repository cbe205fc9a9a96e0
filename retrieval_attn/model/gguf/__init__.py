"""GGUF files: header, tensors, config, tokenizer."""
