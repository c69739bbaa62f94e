"""Data: from text to batches, in an order that does not depend on the layout.

    text files --tokenize, once--> a folder of tokens --windows in one order--> rows of the batch

The terms, in the order in which text becomes a batch:

- source: one entry of ``[data]``: local files, a dataset of the hub, a folder of tokens, or a registered source.
- document: what a line, row or file of text has; bos, its tokens and eos follow each other.
- shard: a part of the text that one process tokenizes, and its tokens.
- folder of tokens: the shards, with an index of their documents; in the cache, or written by ``torchtrain.prepare``.
- window: ``seq_len + 1`` tokens, one row of a batch; its last token is the first token of the next window in the text.
- windows drawn: how many windows a source has returned for all rows so far. With the seed and ``seq_len`` it selects
  the next window: it is the position of the source.
- stream: returns windows of a source. A source that cannot be tokenized first has a stream of its own, with more state.

Read in this order, the names in brackets when you need them:

1. a source: data_source.py, build.py, builtin_sources.py, [standard_library.py, find_files.py, local_files.py];
2. text to tokens: text_input.py, file_formats.py, [builtin_formats.py, tokenizers.py], tokenize_text.py,
   token_folder.py, token_cache.py, [cache_folder.py];
3. tokens to batches: token_dataset.py, window_order.py, [best_fit.py, exclusions.py], order.py, dataloader.py;
4. what a checkpoint compares: data_identity.py.
"""
