"""The benchmark's prompts as text with holes; which project asks with which is in `profiles`.

Holes: {context}, {input}, {question}, {A} to {D}, {func}, {func_call}, {target}, {key}.  Every template has {context}
once.  Wording, spelling included, is the benchmark's: other words give other numbers.
"""

from __future__ import annotations

__all__ = ["CHAT", "COMPLETION", "INFLLM", "KVPRESS"]

_OPTIONS = "\nA. {A}\nB. {B}\nC. {C}\nD. {D}"
_HIDDEN = "There is an important info hidden inside a lot of irrelevant text. Find it"
_QUIZ = " I will quiz you about the important information there.\n\n{context}\n\n"
_MASKED = (
    'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and you'
    " should try to guess who that character is.\n\n"
)
_ONE_LETTER = (
    "Only one of the following options is correct, tell me the answer using one single letter (A, B, C, or D). Don't"
    " say anything else." + _OPTIONS
)
_DELIBERATE = (
    "There is ONLY ONE function in the large project that is deliberately made to include an obvious error. Please find"
    " the function that contains the most obvious errors. I will give you four options to narrow your scope. You can"
    " inspect the options and think. Eventually, tell me the answer using one single letter (A, B, C, or D).\n\n"
    "{context}\n\nWhich funtion has deliberate error?" + _OPTIONS + "\n\n"
)
_EXAMPLES = (
    "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
    "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}"
)
_CRASHES = (
    "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it"
    " crash.\n\n{context}\n\n"
)

# for models that go on with a text: each ends with the beginning of the answer
COMPLETION: dict[str, str] = {
    "passkey": _HIDDEN + " and memorize it. I will quiz you about the important information.\n\n{context}\n\n{input}"
    "\n\nThe pass key is",
    "number_string": _HIDDEN + "." + _QUIZ + "{input}\n\nThe sequence of digits is",
    "kv_retrieval": "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n"
    "{input}",
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": "Read the book and answer the question.\n\n{context}\n\nQuestion: {question}"
    + _OPTIONS
    + "\n\nThe letter of the correct answer is",
    "longbook_qa_eng": "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
    "Question: {question}\nAnswer:",
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{question}\n答案：",
    "math_find": "What is {target} in the following list?\n\n{context}\n\n{input}",
    "math_calc": _EXAMPLES + "\nValues:",
    "code_run": "There is a function called {func} in the following Python code.\n\n{context}\n\n"
    "Please compute the exact value of {func_call}. The value of {func_call} is",
    "code_debug": _CRASHES + "Options:" + _OPTIONS + "\n\nThe correct option is:",
    "longdialogue_qa_eng": _MASKED + "{context}\n\nThe name that has been replaced with $$MASK$$ is likely",
}

# for chat models
CHAT: dict[str, str] = {
    "passkey": _HIDDEN + " and memorize them." + _QUIZ + "{input}",
    "number_string": _HIDDEN + "." + _QUIZ + "{input}",
    "kv_retrieval": COMPLETION["kv_retrieval"],
    "longbook_sum_eng": "Summarize the following book.\n\n{context}",
    "longbook_choice_eng": "Read the book and answer the question.\n\n{context}\n\nQuestion: {question}\n\n"
    + _ONE_LETTER,
    "longbook_qa_eng": "Read the book below and answer a question.\n\n{context}\n\nQuestion: {question}\n\n"
    "Be very concise.",
    "longbook_qa_chn": "请根据以下书籍回答我的问题。\n\n{context}\n\n问题：{question}\n请尽量简短地回答。",
    "math_find": COMPLETION["math_find"],
    "math_calc": "Compute the intermediate values in the following long expression.\n\n{context}",
    "code_run": "Following is a set of Python functions. There is a function called named {func}.\n\n{context}\n\n"
    "Please give me the exact number of the return value of {func_call}. Be concise. Your response must end with the"
    " final returned value.",
    "code_debug": _DELIBERATE + "You should first find the functions in the options. Repeat their content, inspect"
    " through code, and at last give me your answer for the function that has the deliberate and obvious error in A, B,"
    " C, or D.",
    "longdialogue_qa_eng": _MASKED + "The dialogue:\n\n---\n\n{context}\n\n---\n\nEnd of dialogue.\n\n"
    'Which character is most likely "$$MASK$$"? Just say the name used by the scriptwriter (before the colon marks) of'
    " one single character and nothing else.",
}

# InfLLM: the chat prompts, but the key stands before the context too, which makes kv_retrieval easier
INFLLM: dict[str, str] = {
    **CHAT,
    "kv_retrieval": "Extract the value corresponding to the specified key {key} in the JSON object below.\n\n"
    "{context}\n\n{input}",
    "longbook_qa_eng": "Read the book below and answer a question.\n\n{context}\n\nQuestion: {question}\n\n"
    "Please answer as short as possible. The answer is:",
    "code_debug": _DELIBERATE
    + "Give me your answer for the function that has the deliberate and obvious error in A, B,"
    " C, or D. Your answer MUST be chosen from one of the four options without any explanation. If you cannot determine"
    " answers accurately, you also MUST provide the answer you think is most likely. Absolutely do not say you do not"
    " know or you need more information.",
}

# kvpress: (context, question, answer prefix); its rows repeat math_find's hint in the context, but for one of the
# seven questions, and that is kept
KVPRESS: dict[str, tuple[str, str, str]] = {
    "passkey": (_HIDDEN + " and memorize them." + _QUIZ, "{input}", "The pass key is:"),
    "number_string": (_HIDDEN + "." + _QUIZ, "{input}", "The sequence of digits is"),
    "kv_retrieval": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n",
        "{key_only}",
        "The value associated with the specified key is",
    ),
    "longbook_sum_eng": ("Summarize the book below:\n\n{context}\n\n", "{input}", "Summary:"),
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\n{context}\n\n",
        "{input}\n\n" + _ONE_LETTER,
        "The letter of the correct answer is",
    ),
    "longbook_qa_eng": (
        "Read the book below and answer a question. Be very concise in your answer.\n\n{context}\n\n",
        "{input}",
        "Answer:",
    ),
    "longbook_qa_chn": ("请根据以下书籍回答我的问题。\n\n{context}\n\n", "{input}", "答案："),
    "math_find": ("What is {target} in the following list?\n\n{context}\n\n{hint}\n\n", "{input}", ""),
    "math_calc": (_EXAMPLES + "\n\n", "{input}", "Values:"),
    "code_run": (
        "There is a function called {func} in the following Python code.\n\n{context}\n\n",
        "{input}",
        "The return value is:",
    ),
    "code_debug": (_CRASHES, "{input}\n\nOptions:" + _OPTIONS, "The correct option is:"),
    "longdialogue_qa_eng": (
        _MASKED + "{context}\n\n",
        "{input}",
        "The name that has been replaced with $$MASK$$ is likely",
    ),
}
