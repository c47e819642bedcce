"""The functions behind the indexer's ops, with every argument loose. Plain torch; the names are vortex_torch's.

Letters name the operands' formats, then the result's: b a row of q, r a place in the page listing, p a page row.
``winfo_*``: the work list, int32; ``indices``: the page listing. Only the rows of the work list are written.
``max_chunk_size`` and ``num_sms`` shaped a launch grid and have no effect.
"""
