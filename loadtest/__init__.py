"""An honest load generator for servers of language models. It knows nothing of servekit but its doors."""
