"""Data: from text to batches, in an order that does not depend on the layout.

The terms, in the order in which text becomes a batch:

- source: one entry of ``[data]``: local files, a dataset of the hub, prepared data, or a registered source.
- part: what can be read independently of the rest of a source: a document of local text, a file of streamed text.
- reader: one of the readers that share the parts of a source; reader ``r`` of ``n`` reads every ``n``-th part.
- window: ``seq_len + 1`` tokens, one row of a batch; the last token is the first of the row's next window.
- stream: returns the windows of a row. A reader of text serves one row, or several neighbors; prepared data serve all.
- windows drawn: how many windows a source has given to all rows so far; of prepared data it alone selects the window.
- position: where a stream resumes: number of its next part over all epochs, document in the part, token in that.
"""
