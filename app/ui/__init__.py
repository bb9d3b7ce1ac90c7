"""The browser page. Gradio reads its telemetry switch once, when it is imported, so it is set here, before any part
of the page can import it: Fireside calls nobody.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
