"""Environment of a pytest that our tests start: no plugins but those it is told to load.

Loading every plugin installed beside us costs each process more than all of its tests.
"""

LEAN_PYTEST = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
EVERY_PLUGIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
