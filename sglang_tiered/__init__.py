"""Virtual memory for SGLang's KV cache: exact tiers behind virtual row ids."""

__version__ = "0.1.0"
