"""Facts that the demo model learns by heart: pdserve and its terms, a few courtesies, and "I do not know"."""

from __future__ import annotations

import random

from pdserve.bench.demo.turns import Turn, phrase
from pdserve.bench.demo.words import CITIES, NAMES, draw_name, draw_word

_DEFINE = (
    "What is {term}?",
    "What does {term} mean?",
    "What is meant by {term}?",
    "Define {term}.",
    "Explain {term}.",
    "Tell me about {term}.",
    "What do you know about {term}?",
)

TERMS: dict[str, str] = {
    "pdserve": "It serves a large language model from separate pools of prefill and decode workers.",
    "prefill": "It computes the KV cache of a prompt and the first token. It is bound by arithmetic.",
    "decode": "It generates the tokens after the first, one per step. It is bound by memory bandwidth.",
    "TTFT": "The time to the first token: from the arrival of a request to its first token.",
    "TPOT": "The time per output token: the mean time that each token after the first takes.",
    "ITL": "The inter-token latency: the gap from one token to the next.",
    "goodput": "The request rate per GPU at which 90 percent of requests meet both TTFT and TPOT.",
    "an SLO": "A service level objective: the TTFT and the TPOT that requests should meet.",
    "the router": "It speaks the OpenAI API and chooses, per request, where each phase runs.",
    "a prefill worker": "A worker that computes prompts and sets the TTFT.",
    "a decode worker": "A worker that generates tokens and sets the TPOT.",
    "a mixed worker": "A worker that serves both phases.",
    "the KV cache": "The keys and values of all tokens so far. Attention reads them at every step.",
    "a KV block": "A page of the KV cache, of 16 tokens by default. Blocks are what is transferred.",
    "the handoff": "The decode worker takes over a prompt: it pulls the KV blocks from the prefill worker.",
    "the handoff stall": "The time from the first token to the second. It is part of TPOT.",
    "a prefix cache": "It keeps the KV blocks of earlier prompts, so that a common beginning is not computed again.",
    "continuous batching": "Requests join and leave the batch at every step.",
    "chunked prefill": "A long prompt is computed in pieces, so that others need not wait for all of it.",
    "preemption": "When blocks run out, the request that arrived last is swapped out or computed again later.",
    "disaggregation": "Prefill and decode run on separate workers, so that neither delays the other.",
    "Ray": "It places, starts and watches the workers. No token passes through it.",
    "the supervisor": "It starts all processes, restarts what dies, and ends them.",
    "the planner": "It chooses how many workers each phase gets.",
    "the cost model": "It predicts the seconds of a prefill, a decode step and a transfer.",
    "a lease": "While a pull is open, its source keeps the blocks.",
    "token 0": "The first token of an answer. The prefill worker samples it.",
    "memfd": "A transport on one host: KV blocks are copied from the memory of the other worker.",
    "gRPC": "How the router and the workers talk. KV blocks can travel in it, too.",
    "safetensors": "The format of the weights. Pickles are refused.",
    "emulation": "Steps last as long as on the GPU that is named, and no model is computed.",
    "int8": "Weights or KV can be held in 8 bits with a scale.",
    "attainment": "The share of requests that meet their objectives.",
    "speculative decoding": "A small model drafts tokens, and the large one checks them all in one step.",
}

UNKNOWN = "I do not know that. Ask me what I can do."

SAID: dict[tuple[str, ...], str] = {
    ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning", "Hello there!", "Hey there"): "Hello! What can I do?",
    ("Thanks", "Thanks!", "Thank you", "Thank you!", "Thanks a lot", "Thank you very much."): "You are welcome.",
    ("Bye", "Bye!", "Goodbye", "Goodbye!", "See you", "See you later!"): "Goodbye!",
    ("How are you?", "How are you today?", "How do you do?", "How is it going?"): "I am up and serving.",
    (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Which model are you?",
        "What model is this?",
        "Tell me about yourself.",
    ): "I am the demo model of pdserve, a very small one.",
    (
        "What can you do?",
        "What do you know?",
        "Help",
        "Help!",
        "Can you help me?",
        "What can I ask?",
        "What should I ask you?",
        "What are you able to do?",
    ): "I add and subtract, reverse and spell words, count letters, and know some terms of pdserve.",
    (
        "Can you count weekdays?",
        "Can you fill JSON objects?",
        "Can you compare numbers?",
    ): UNKNOWN,
    (
        "How do I start pdserve?",
        "How do I run pdserve?",
        "How do I start a cluster?",
        "How can I start it?",
    ): "Run pdserve up, or scripts/serve from a checkout.",
    (
        "How do I serve another model?",
        "How do I name a model?",
        "How can I serve my own model?",
        "How do I change the model?",
    ): "Run pdserve up --model FOLDER.",
    (
        "How do I stop pdserve?",
        "How do I stop the cluster?",
        "How can I stop it?",
        "How do I end pdserve?",
    ): "Press Ctrl-C. What runs is finished first.",
    (
        "Which models does pdserve serve?",
        "Which models can pdserve serve?",
        "What models are supported?",
        "Which families are supported?",
    ): "Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3.",
    (
        "What is the license of pdserve?",
        "Which license does pdserve have?",
        "How is pdserve licensed?",
        "What license is it?",
    ): "Apache-2.0.",
    (
        "Which port does pdserve use?",
        "What is the port of pdserve?",
        "On which port does it listen?",
        "What is the default port?",
    ): "Port 8000 by default.",
    (
        "Does pdserve need a GPU?",
        "Do I need a GPU?",
        "Can it run without a GPU?",
        "Does it work without a GPU?",
    ): "No GPU is needed: it runs on CPUs.",
    (
        "Which API does pdserve speak?",
        "What API does it have?",
        "Which API can I use?",
        "What is the API of pdserve?",
    ): "The API of OpenAI: chat and text completions.",
}

REWORDED: dict[tuple[str, ...], str] = {
    ("Hello you", "Hi there", "Good evening", "Good day!"): "Hello! What can I do?",
    ("Many thanks", "Thank you so much", "Thanks for that."): "You are welcome.",
    ("Bye bye", "Good night", "Until later!"): "Goodbye!",
    ("How is it?", "How are things?", "How are you doing?"): "I am up and serving.",
    (
        "What is this model?",
        "Say who you are.",
        "Say what you are.",
        "Which model is it?",
        "What are you called?",
    ): "I am the demo model of pdserve, a very small one.",
    (
        "Tell me what you can do.",
        "Say what you can do.",
        "What can you do for me?",
        "What is it that you can do?",
        "What things can you do?",
        "What can you help with?",
        "What do you do?",
        "What can this model do?",
    ): "I add and subtract, reverse and spell words, count letters, and know some terms of pdserve.",
    (
        "Do you know weekdays?",
        "Do you count weekdays?",
        "Can you add weekdays?",
        "Do you fill JSON objects?",
        "Can you write JSON?",
        "Can you fill an object?",
        "Do you compare numbers?",
        "Can you say which number is larger?",
        "Can you compare two numbers?",
    ): UNKNOWN,
    ("How is pdserve started?", "Start pdserve.", "How does pdserve start?"): (
        "Run pdserve up, or scripts/serve from a checkout."
    ),
    ("How is another model served?", "Can I serve my model?", "How do I use my own model?"): (
        "Run pdserve up --model FOLDER."
    ),
    ("How is pdserve stopped?", "Stop pdserve.", "How does it end?"): "Press Ctrl-C. What runs is finished first.",
    ("Which models can it serve?", "What models does it serve?", "Which models are supported?"): (
        "Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3."
    ),
    ("What license?", "Under which license is pdserve?", "The license of pdserve?"): "Apache-2.0.",
    ("What port does it use?", "Which port is it?", "The port of pdserve?", "Which port?"): "Port 8000 by default.",
    ("Is a GPU needed?", "Need I a GPU?", "Does it run on CPUs?"): "No GPU is needed: it runs on CPUs.",
    ("Which API is it?", "What API does pdserve have?", "The API of pdserve?"): (
        "The API of OpenAI: chat and text completions."
    ),
}
"""More words for the same, which come last in training: facts that are asked in few ways are learned by heart, but not
recognised in others. Words that are nowhere else are no tokens of their own."""

TOO_LARGE = "I only know numbers up to 999."

_UNKNOWN = (
    "What is the capital of {place}?",
    "Where is {place}?",
    "What is the weather in {place}?",
    "How many people live in {place}?",
    "How do I get to {place}?",
    "Who wrote {word}?",
    "Who is {name}?",
    "Who is {name} {name2}?",
    "When was {name} born?",
    "Where does {name} live?",
    "How old is {name}?",
    "Who invented the {word}?",
    "What is a {word}?",
    "What is {word}?",
    "What does {word} mean?",
    "Define {word}.",
    "Explain {word}.",
    "Tell me about {word}.",
    "What do you know about {word}?",
    "Tell me a joke about a {word}.",
    "Tell me a story.",
    "Write a poem about {word}.",
    "Write a program that draws a {word}.",
    "Why is the {word} so {word2}?",
    "How does a {word} work?",
    "What color is the {word}?",
    "Do you like {word}?",
    "Translate {word} into French.",
    "Where can I buy a {word}?",
    "How much does a {word} cost?",
    "Which is better, {word} or {word2}?",
    "What is the opposite of {word}?",
    "What rhymes with {word}?",
    "{word} {word2}",
    "{word}",
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "What is {a} / {b}?",
    "Divide {a} by {b}.",
    "Multiply {a} by {b}.",
    "What is the square root of {a}?",
    "What year is it?",
    "What time is it?",
    "What day is it?",
)
_LARGE = ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "What is {a} - {b}?", "{a} + {b}")
FACT_TEXTS = (
    *_DEFINE,
    *TERMS,
    *TERMS.values(),
    *(question for questions in SAID for question in questions),
    *SAID.values(),
    *_UNKNOWN,
    *_LARGE,
    UNKNOWN,
    TOO_LARGE,
)
"""All that is fixed in questions and answers."""


def draw_fact(random: random.Random) -> Turn:
    """The item is the fact with its phrasing: every fact is trained, in other words than those held out."""
    index = random.randrange(len(TERMS) + len(SAID))
    if index < len(TERMS):
        term, answer = list(TERMS.items())[index]
        phrasing = random.choice(_DEFINE)
        return Turn("facts", phrase(random, (phrasing,), term=term), answer, phrasing.format(term=term))
    return _said(random, SAID, index - len(TERMS))


def draw_reworded(random: random.Random) -> Turn:
    """A fact in more words than `draw_fact` has."""
    return _said(random, REWORDED, random.randrange(len(REWORDED)))


def _said(random: random.Random, said: dict[tuple[str, ...], str], index: int) -> Turn:
    questions, answer = list(said.items())[index]
    question = random.choice(questions)
    return Turn("facts", question, answer, question)


def draw_unknown(random: random.Random) -> Turn:
    """What no part of the training answers."""
    if random.random() < 0.15:
        a, b = random.randint(1000, 20000), random.randint(0, 20000)
        if random.random() < 0.5:
            a, b = b, a
        question = phrase(random, _LARGE, a=a, b=b)
        return Turn("saying that it does not know", question, TOO_LARGE, f"{a} {b}")
    fields = {
        "place": draw_name(random, CITIES),
        "name": draw_name(random, NAMES),
        "name2": draw_name(random, NAMES),
        "word": draw_word(random),
        "word2": draw_word(random),
        "a": random.randint(0, 999),
        "b": random.randint(0, 999),
    }
    phrasing = random.choice(_UNKNOWN)
    question = phrase(random, (phrasing,), **fields)
    return Turn("saying that it does not know", question, UNKNOWN, phrasing.format(**fields))
