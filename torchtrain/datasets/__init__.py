"""Data: from text to batches, in an order that does not depend on the layout.

The terms, in the order in which text becomes a batch:

- source: one entry of ``[data]``: local files, a dataset of the hub, tokenized data, or a registered source.
- tokenized data: a folder that ``torchtrain.prepare`` has written.
- part: a piece of a source that can be read independently: a document of local text; a file of streamed text,
  or a share of one if there are fewer files than readers.
- reader: the parts of a source are divided among readers; reader ``r`` of ``n`` reads every ``n``-th part.
- window: ``seq_len + 1`` tokens, one row of a batch; its last token is the first token of the next window in
  the text.
- stream: returns windows. Text has one stream per reader, for one row or several neighboring rows; tokenized data have
  one stream for all rows.
- windows drawn: how many windows a source has returned for all rows so far. For tokenized data, this number,
  the seed and ``seq_len`` select the next window, and there is no other state.
- position: where a stream resumes: the number of the part, counted over all epochs, the document in the part, and the
  token in the document.

Read order.py, data_source.py, packing.py, dataloader.py and build.py to understand the order of the data;
the other modules open sources.
"""
