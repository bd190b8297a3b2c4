"""The dashboard: the mesh as a picture in a browser, and a chat box.

`mesh_picture`, `known_machines`, `rate_history` and `totals` are pure and make of the status what is to be seen;
`picture_html` writes it; `watch` asks; `access` lets people in; `chat_source` talks to models. Only `mount`, `page`,
`login`, `chat_box` and `speed_chart` import NiceGUI, which the extra `meshnet[dashboard]` brings.
"""
