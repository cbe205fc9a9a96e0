"""GraphWalks' form: edges of a directed graph, and a breadth-first search or the parents of a node.

After the card of the data set openai/graphwalks: nodes are short hexadecimal strings, the prompt has an example, a
search returns the nodes at exactly the given depth without the start (wording of the 2026 revision), parents do not
contain the node, and the score is the F1 of the two sets. Deviations: the answer has 1 to 6 nodes at every length, so
that its tokens do not grow with the graph, and "Final Answer: [" begins the answer for the model.
"""

from __future__ import annotations

import random
from typing import Any

from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["Walk"]

INSTRUCTION = (
    "Below is a directed graph as a list of edges, then an operation on it. Answer with the set of nodes that the "
    "operation returns. A breadth-first search (BFS) of depth d returns the nodes whose shortest path from the start "
    "has exactly d edges. The parents of a node are the nodes with an edge to it. The node itself is never returned.\n"
    "\nExample edges:\nuvwx -> alke\nabcd -> uvwx\nabcd -> efgh\nefgh -> uvwx\n"
    "Operation: BFS from node abcd with depth 1.\nFinal Answer: [uvwx, efgh]\n"
    "Operation: Find the parents of node uvwx.\nFinal Answer: [abcd, efgh]\n"
    "Operation: Find the parents of node abcd.\nFinal Answer: []\n\n"
    "The graph has these edges:\n"
)
QUESTIONS = {
    "bfs": "\n\nOperation: BFS from node {node} with depth 2.",
    "parents": "\n\nOperation: Find the parents of node {node}.",
}
PREFIX = "\nFinal Answer: ["
_HEX = "0123456789abcdef"
_DIGITS = 10
_MAX_ANSWER = 6
_SAMPLE = 256
_DEGREE = 2


class Walk(Draft):
    """Unit: an edge besides those that decide the answer, which no unit changes. answers: the nodes of the answer."""

    exact = False

    def __init__(self, operation: str, drawn: random.Random, counter: TokenCounter) -> None:
        """operation: bfs or parents. drawn: decides everything."""
        self._drawn, self._known = drawn, set[str]()
        node = self._node()
        self._start = {node}
        """Nodes from which no further edge may start, for a search, or to which none may lead, for parents."""
        self._search = operation == "bfs"
        found = [self._node() for _ in range(drawn.randint(1, _MAX_ANSWER))]
        if self._search:
            middle = [self._node() for _ in range(drawn.randint(1, 3))]
            self._start |= set(middle)
            self._edges = [(node, one) for one in middle] + [(drawn.choice(middle), one) for one in found]
        else:
            self._edges = [(one, node) for one in found]
        drawn.shuffle(self._edges)
        self.answers = tuple(found)
        self.question, self.prefix = QUESTIONS[operation].format(node=node), PREFIX
        self._nodes = [*self._known]
        self._others: list[tuple[str, str]] = []
        self._places = drawn.getrandbits(64)
        self._fixed = counter.count(INSTRUCTION + self._listed(self._edges))
        self._per_edge = counter.count(self._listed(self._first(_SAMPLE))) / _SAMPLE

    def _node(self) -> str:
        while (name := "".join(self._drawn.choices(_HEX, k=_DIGITS))) in self._known:
            pass
        self._known.add(name)
        return name

    def _first(self, count: int) -> list[tuple[str, str]]:
        """Return `count` edges that leave the answer as it is."""
        while len(self._others) < count:
            if len(self._others) % _DEGREE == 0:
                self._nodes.append(self._node())
            edge = self._drawn.choice(self._nodes), self._drawn.choice(self._nodes)
            fixed = edge[0] if self._search else edge[1]
            if edge[0] != edge[1] and fixed not in self._start:
                self._others.append(edge)
        return self._others[:count]

    @staticmethod
    def _listed(edges: list[tuple[str, str]]) -> str:
        return "\n".join(f"{first} -> {second}" for first, second in edges)

    def estimate(self, n: int) -> float:
        return self._fixed + n * self._per_edge

    def context(self, n: int) -> str:
        edges = [*self._edges, *self._first(n)]
        random.Random(self._places).shuffle(edges)
        return INSTRUCTION + self._listed(edges)

    def meta(self, n: int, context: str) -> dict[str, Any]:
        return {"edges": n + len(self._edges), "answer_nodes": len(self.answers)}
