"""Quality of KV policies on recorded agent runs, and what their parts are worth; phases as subspaces of queries."""
