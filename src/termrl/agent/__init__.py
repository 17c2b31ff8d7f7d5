"""The agent: one episode function for every caller.

``types`` holds the nouns, ``reply`` reads what the policy said (``shell`` knows where a here-document is open),
``prompts`` what it is told, ``episode`` is the loop, ``policy`` the chat client.
"""
