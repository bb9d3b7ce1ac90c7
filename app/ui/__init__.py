"""The browser page. Gradio reads its switches from the environment once, when it is imported, so they are set here,
before any part of the page can import it.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Fireside calls nobody
# After so many events Gradio sums them up with pandas, for a dashboard that we leave off: by default after each one.
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(10**12)
