"""How meshnet's own chats draw, in the terminal and in the dashboard.

The API's own default is 1, as OpenAI's is, which makes small models ramble; their makers advise 0.2 to 0.7.
"""

from __future__ import annotations

CHAT_TEMPERATURE = 0.6
CHAT_TOP_P = 0.9
