"""Data: from text to batches, in an order that no layout can change.

The terms, in the order in which text becomes a batch:

- source: one entry of ``[data]``: local files, a dataset of the hub, or prepared data.
- unit: what a source can read without what is before it: a document of local text, a file of streamed text.
- lane: one of the readers that share a source's units; lane ``l`` of ``n`` reads every ``n``-th unit.
- window: ``seq_len + 1`` tokens, one row of a batch; the last token is the first of the row's next window.
- stream: gives a row its windows. A lane of text serves one row, or several neighbors; prepared data serve all rows.
- turn: how many windows a source has given to all rows before this one; of prepared data it alone gives the window.
- place: where a stream goes on: the number of its next unit over all epochs, the document in it, the token in that.
"""
