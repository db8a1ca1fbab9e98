"""A connector's half beside the KV memory of each rank (``rank_data``), for any number of ranks.

A single rank's half is in the process of the control half. Several ranks run a ``RankHalf`` in processes of their own; the
control half uses them as one (``rank_data_group``), over sockets (``rank_messages``).
"""
