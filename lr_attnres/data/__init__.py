"""From text to packed rows of tokens: documents, tokenizers, packing, and held-out rows for evaluation."""

from ..lazy_names import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "documents": ("open_documents",),
        "held_out": ("check_batch_size", "check_same_tokens", "make_batches", "open_rows", "take_tokens"),
        "manifest": ("Manifest",),
        "packed_tokens": ("PackedTokens", "file_hash", "load_data_tokenizer", "verify_data"),
        "packing": ("prepare_data",),
        "tokenizers": (
            "CL100K_VOCAB_SIZE",
            "END_OF_TEXT",
            "SPECIAL_TOKENS",
            "check_vocabulary",
            "cl100k_tokenizer",
            "find_tokenizer",
            "load_tokenizer",
            "open_tokenizer",
            "train_tokenizer",
            "vocabulary_size",
        ),
    },
)
