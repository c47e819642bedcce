"""The functions behind the cache side's ops, with every argument loose. Plain torch; the names are vortex_torch's.

``loc`` [n]: the slots of the tokens of a call. Only pages whose last slot is among them are touched: row
``(slot // page_size) * num_kv_heads + head``. Letters: p a page row of the pool, r row ``token * num_kv_heads + head``.
"""
