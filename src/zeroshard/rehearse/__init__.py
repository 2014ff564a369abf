"""The command `zeroshard rehearse`: run a script with real ranks here (``rank``), and compare them (``checks``)."""
