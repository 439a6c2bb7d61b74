"""The shapes of published data sets, with contents made up: what each trains, or what the user is asked."""

import json
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of a data set under its columns' names."""

    rows: list[Row]
    trains: list[str] | None = None
    """The trained stretches of the first row, under the task that `init` takes."""
    asks: str = ""
    """A pattern of what is asked or refused instead."""
    may: list[str] = field(default_factory=list)
    """Stretches that the first row may train if a suggestion is obeyed; any if a suggestion is not expected."""
    task: str = ""
    """The objective that `init` takes, if not sft."""
    note: str = ""
    """A pattern of a note."""


Q, A, R = "What is two and two?", "It makes four.", "Two and two, that is one more than three, hence four."
B = "It makes five, I would say."
USER, SAID = {"role": "user", "content": Q}, {"role": "assistant", "content": A}
WORSE = {"role": "assistant", "content": B}
HUMAN, GPT = {"from": "human", "value": Q}, {"from": "gpt", "value": A}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
PLAIN_TOOL = {"name": "add", "description": "adds", "parameters": {"a": {"type": "int"}}}
CALL = {"name": "add", "arguments": {"a": 2}}


def chat(*more: Row) -> list[Row]:
    return [USER, SAID, *more]


def shapes(**columns: Any) -> list[Row]:
    """Two rows, which differ in the number that each text has."""
    return [columns, json.loads(json.dumps(columns).replace("two", "2"))]


def sft(*stretches: str) -> list[str]:
    """Stretches of ChatML with these texts."""
    return [f"{text}<|im_end|>" for text in stretches]


FOUR, FIVE = sft(A), sft(B)
REASONED = sft(f"<think>\n{R}\n</think>\n{A}")
SHORTLY = sft(f"<think>\n{R}\n</think>\n4")

PUBLISHED: dict[str, Shape] = {
    "ShareGPT, Vicuna": Shape(rows=shapes(id="x", conversations=[HUMAN, GPT]), trains=FOUR),
    "ShareGPT, assistant first": Shape(
        rows=shapes(conversations=[GPT | {"value": "Hello there."}, HUMAN, GPT]), trains=sft("Hello there.", A)
    ),
    "ShareGPT, items": Shape(rows=shapes(id="x", items=[HUMAN, GPT]), asks="items", may=FOUR),
    "OpenHermes 2.5": Shape(
        rows=shapes(
            conversations=[HUMAN, GPT],
            source="airoboros",
            category="general",
            system_prompt=None,
            skip_prompt_formatting=None,
        ),
        trains=FOUR,
    ),
    "UltraChat 200k": Shape(rows=shapes(prompt=Q, prompt_id="ab12", messages=chat()), trains=FOUR),
    "UltraFeedback binarized": Shape(
        rows=shapes(
            prompt=Q,
            prompt_id="ab",
            chosen=chat(),
            rejected=[USER, WORSE],
            messages=chat(),
            score_chosen=8.5,
            score_rejected=3.0,
        ),
        trains=FOUR,
        task="dpo",
    ),
    "HelpSteer": Shape(
        rows=shapes(prompt=Q, response=A, helpfulness=4, correctness=3, coherence=4, complexity=2, verbosity=2),
        trains=FOUR,
    ),
    "Tulu 3": Shape(rows=shapes(id="x", messages=chat(), source="ai2/x"), trains=FOUR),
    "SlimOrca, with weights": Shape(
        rows=shapes(
            conversations=[
                {"from": "system", "value": "Be brief.", "weight": None},
                HUMAN | {"weight": 0.0},
                GPT | {"weight": 1.0},
            ]
        ),
        trains=FOUR,
    ),
    "OpenOrca": Shape(rows=shapes(id="flan.1", system_prompt="Be brief.", question=Q, response=A), trains=FOUR),
    "Magpie": Shape(
        rows=shapes(
            uuid="u",
            conversations=[HUMAN, GPT],
            gen_input_config={"temperature": 1},
            task_category="Math",
            difficulty="easy",
        ),
        trains=FOUR,
    ),
    "OpenThoughts": Shape(rows=shapes(system="Be brief.", conversations=[HUMAN, GPT]), trains=FOUR),
    "GSM8K": Shape(rows=shapes(question=Q, answer=f"{R} #### 4"), trains=sft(f"{R} #### 4")),
    "MATH": Shape(rows=shapes(problem=Q, level="Level 2", type="Algebra", solution=R), trains=sft(R)),
    "NuminaMath 1.5": Shape(
        rows=shapes(
            problem=Q, solution=R, answer="4", problem_type="Algebra", question_type="word", source="x", synthetic=False
        ),
        trains=sft(R),
    ),
    "Hermes function calling": Shape(
        rows=shapes(
            id="x",
            conversations=[
                {"from": "system", "value": f"Tools: <tools>{json.dumps(PLAIN_TOOL)}</tools>"},
                HUMAN,
                GPT | {"value": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
            ],
            tools=json.dumps([TOOL]),
            category="x",
        ),
        trains=sft(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"),
    ),
    "APIGen-MT": Shape(
        rows=shapes(
            system="Be brief.",
            conversations=[
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "4"},
                GPT,
            ],
            tools=json.dumps([PLAIN_TOOL]),
        ),
        trains=sft(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>", A),
    ),
    "ToolACE": Shape(
        rows=shapes(
            system="You call functions.",
            conversations=[{"from": "user", "value": Q}, {"from": "assistant", "value": "[add(a=2)]"}],
        ),
        trains=sft("[add(a=2)]"),
    ),
    "smoltalk2": Shape(
        rows=shapes(
            messages=chat(),
            chat_template_kwargs={
                "custom_instructions": "",
                "enable_thinking": False,
                "python_tools": [],
                "xml_tools": [],
            },
            source="x",
        ),
        trains=FOUR,
    ),
    "no_robots": Shape(rows=shapes(prompt=Q, prompt_id="ab", messages=chat(), category="Open QA"), trains=FOUR),
    "hh-rlhf": Shape(
        rows=shapes(chosen=f"\n\nHuman: {Q}\n\nAssistant: {A}", rejected=f"\n\nHuman: {Q}\n\nAssistant: {B}"),
        trains=[" four.<|im_end|>"],
        task="dpo",
    ),
    "hh-rlhf, conversational": Shape(rows=shapes(chosen=chat(), rejected=[USER, WORSE]), trains=FOUR, task="dpo"),
    "Anthropic, parts of text": Shape(
        rows=shapes(
            messages=[
                USER | {"content": [{"type": "text", "text": Q}]},
                SAID | {"content": [{"type": "text", "text": A}]},
            ]
        ),
        trains=FOUR,
    ),
    "LangChain, flat": Shape(
        rows=shapes(messages=[{"type": "human", "content": Q}, {"type": "ai", "content": A}]),
        asks="wrong role",
        may=FOUR,
    ),
    "OpenAI, weight": Shape(
        rows=shapes(messages=[USER, WORSE | {"weight": 0}, USER, SAID | {"weight": 1}]), trains=FOUR
    ),
    "argilla dpo mix": Shape(
        rows=shapes(
            dataset="x",
            chosen=chat(),
            chosen_rating=5.0,
            chosen_model="m",
            rejected=[USER, WORSE],
            rejected_rating=3.0,
            rejected_model="n",
        ),
        trains=FOUR,
        task="dpo",
    ),
    "Skywork reward preferences": Shape(
        rows=shapes(chosen=chat(), rejected=[USER, WORSE], source="x"), trains=FOUR, task="dpo"
    ),
    "KTO mix": Shape(
        rows=shapes(dataset="x", prompt=[USER], completion=[SAID], label=True, rating=4.0, model="m"),
        trains=FOUR,
        task="kto_zero",
    ),
    "LMSYS chat": Shape(
        rows=shapes(
            conversation_id="x",
            model="m",
            conversation=chat(),
            turn=1,
            language="English",
            openai_moderation=[{"flagged": False}],
            redacted=False,
        ),
        trains=FOUR,
    ),
    "Aya": Shape(
        rows=shapes(
            inputs=Q, targets=A, language="English", language_code="eng", annotation_type="original", user_id="u"
        ),
        asks="targets",
        may=FOUR,
    ),
    "FLAN": Shape(rows=shapes(inputs=Q, targets=A, task="add"), asks="targets", may=FOUR),
    "Dolly": Shape(rows=shapes(instruction=Q, context="", response=A, category="open_qa"), trains=FOUR),
    "OpenMathInstruct 2": Shape(
        rows=shapes(problem=Q, generated_solution=R, expected_answer="4", problem_source="augmented_math"),
        trains=sft(R),
    ),
    "Llama-Nemotron": Shape(
        rows=shapes(
            input=[USER],
            output=A,
            category="math",
            license="cc",
            generator="m",
            used_in_training="no",
            version="v1",
            system_prompt="Be brief.",
        ),
        trains=FOUR,
    ),
    "OpenR1-Math": Shape(
        rows=shapes(
            problem=Q,
            solution=R,
            answer="4",
            messages=chat(),
            generations=[A, B],
            is_reasoning_complete=[True, False],
            correctness_count=1,
        ),
        trains=FOUR,
    ),
    "Mixture-of-Thoughts": Shape(rows=shapes(messages=chat(), num_tokens=12, source="x"), trains=FOUR),
    "Bespoke-Stratos": Shape(
        rows=shapes(
            system="Be brief.", conversations=[{"from": "user", "value": Q}, {"from": "assistant", "value": A}]
        ),
        trains=FOUR,
    ),
    "CodeAlpaca": Shape(rows=shapes(instruction=Q, input="", output=A), trains=FOUR),
    "SWE-smith": Shape(
        rows=shapes(
            messages=json.dumps(chat()),
            instance_id="x__y-1",
            resolved=True,
            model="m",
            traj_id="t",
            patch="diff --git a b",
        ),
        trains=FOUR,
    ),
    "s1K, tokenized": Shape(rows=shapes(text=f"{Q} {R}"), trains=[f"{Q[1:]} {R}<|im_end|>"], task="cpt"),
    "Anthropic, tool_use": Shape(
        rows=shapes(
            messages=[
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 2}}]},
            ]
        ),
        asks="tool_use.*tool_calls",
    ),
    "Intel orca_dpo_pairs": Shape(
        rows=shapes(system="Be brief.", question=Q, chosen=A, rejected=B),
        asks="`system` is not read.*data.ignore",
        may=FOUR,
    ),
    "LangChain, with data": Shape(
        rows=shapes(messages=[{"type": "human", "data": {"content": Q}}, {"type": "ai", "data": {"content": A}}]),
        asks="no role",
    ),
    "Capybara": Shape(rows=shapes(source="x", conversation=[{"input": Q, "output": A}]), asks="no role"),
    "PRM, TRL": Shape(rows=shapes(prompt=Q, completions=[R, A], labels=[True, False]), asks="labels"),
    "Toucan SFT": Shape(
        rows=shapes(messages=str(chat()), question=Q, target_tools="add", uuid="u", subset_name="s"),
        asks="as Python prints",
    ),
    "UltraFeedback": Shape(
        rows=shapes(
            source="x",
            instruction=Q,
            models=["m", "n"],
            completions=[{"response": A, "model": "m"}],
            correct_answers=["None"],
            incorrect_answers=["None"],
        ),
        asks="instruction",
    ),
    "HelpSteer 3": Shape(
        rows=shapes(
            domain="general", language="english", context=[USER], response1=A, response2=B, overall_preference=-2
        ),
        asks="response1",
    ),
    "s1K": Shape(
        rows=shapes(
            solution="4",
            question=Q,
            cot_type="math",
            source_type="x",
            metadata="{'a': 1}",
            cot=None,
            thinking_trajectories=[R],
            attempt=A,
        ),
        asks="attempt",
        may=[*FOUR, *sft("4"), *sft(f"<think>\n{A}\n</think>\n4")],
    ),
    "UltraChat": Shape(rows=shapes(id="0", data=[Q, A]), asks="'data'"),
    "a version and its data": Shape(
        rows=shapes(version=1, data=[{"title": "x", "paragraphs": []}]), asks="'version', 'data'"
    ),
    "Nectar": Shape(
        rows=shapes(prompt=f"Human: {Q}", answers=[{"answer": A, "model": "m", "rank": 1.0}], turns=1, num_responses=7),
        asks="answers",
    ),
    "Gemini": Shape(
        rows=shapes(
            systemInstruction={"role": "system", "parts": [{"text": "Be brief."}]},
            contents=[{"role": "user", "parts": [{"text": Q}]}, {"role": "model", "parts": [{"text": A}]}],
        ),
        asks="contents",
    ),
    "distilabel-intel-orca-dpo-pairs": Shape(
        rows=shapes(input=Q, chosen=A, rejected=B, status="tie", chosen_score=9.0, in_gsm8k_train=False),
        trains=FOUR,
        task="dpo",
    ),
    "LIMO": Shape(
        rows=shapes(question=Q, solution=R, answer="4"), asks="`solution`.*`answer`", may=[*sft(R), *sft("4"), *SHORTLY]
    ),
    "OpenAssistant": Shape(
        rows=[
            {"message_id": "a", "parent_id": None, "text": Q, "role": "prompter", "lang": "en"},
            {"message_id": "b", "parent_id": "a", "text": A, "role": "assistant", "lang": "en"},
        ],
        asks="`role` names the speaker",
        may=[f"{Q[1:]}<|im_end|>"],
    ),
    "Toucan": Shape(
        rows=shapes(
            uuid="u",
            question=Q,
            target_tools="add",
            available_tools=json.dumps([TOOL]),
            messages=json.dumps(
                [
                    USER,
                    {"role": "assistant", "content": "", "function_call": CALL},
                    {"role": "function", "name": "add", "content": "4"},
                    SAID,
                ]
            ),
        ),
        asks="`available_tools` holds tools",
        may=sft(f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>", A),
    ),
    "xLAM": Shape(
        rows=shapes(id=7, query=Q, answers=json.dumps([CALL]), tools=json.dumps([PLAIN_TOOL])), asks="answers"
    ),
    "OpenThoughts, metadata": Shape(
        rows=shapes(
            problem=Q,
            deepseek_reasoning=R,
            deepseek_solution=A,
            ground_truth_solution="Just four.",
            domain="math",
            source="x",
            test_cases=None,
            starter_code=None,
        ),
        asks="deepseek_solution",
        may=[*FOUR, *sft(R), *sft("Just four."), *REASONED],
    ),
    "s1K 1.1": Shape(
        rows=shapes(
            solution="4",
            question=Q,
            cot_type="math",
            source_type="x",
            metadata=json.dumps({"a": "b c"}),
            gemini_thinking_trajectory=R,
            gemini_attempt=A,
            deepseek_thinking_trajectory=f"{R} So.",
            deepseek_attempt=B,
        ),
        asks="gemini_attempt",
        may=[*FOUR, *FIVE, *sft("4", R, f"{R} So."), *SHORTLY],
    ),
    "medical-o1": Shape(
        rows=shapes(Question=Q, Complex_CoT=R, Response=A),
        asks="Complex_CoT",
        may=[*FOUR, *sft(R), *REASONED],
    ),
    "LangSmith": Shape(
        rows=shapes(id="x0", inputs={"messages": [USER]}, outputs={"messages": [SAID]}),
        asks="messages in inputs.messages and outputs.messages",
    ),
    "PRM800K": Shape(
        rows=shapes(
            labeler="d8aa7923-b970",
            timestamp="2022-07-30",
            generation=None,
            is_initial_screening_question=False,
            question={"problem": Q, "ground_truth_answer": "4"},
            label={"steps": []},
        ),
        asks="labeler",
    ),
    "arena-55k": Shape(
        rows=shapes(
            id=65089,
            model_a="m",
            model_b="n",
            prompt=json.dumps([Q]),
            response_a=json.dumps([A]),
            response_b=json.dumps([B]),
            winner_model_a=1,
            winner_model_b=0,
            winner_tie=0,
        ),
        asks="response_a",
    ),
    "Baize": Shape(
        rows=shapes(topic="How do two numbers add up?", input=f"[|Human|] {Q}\n[|AI|] {A}\n[|Human|] "), asks="topic"
    ),
}

CALLED = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
RECENT: dict[str, Shape] = {
    "Dolci Instruct SFT": Shape(
        rows=shapes(
            id="x",
            messages=[
                {
                    "role": "system",
                    "content": "Be brief.",
                    "functions": json.dumps([PLAIN_TOOL]),
                    "function_calls": None,
                },
                USER | {"functions": None, "function_calls": None},
                {"role": "assistant", "content": None, "functions": None, "function_calls": "add(a=2)"},
                {"role": "environment", "content": "4", "functions": None, "function_calls": None},
                SAID | {"functions": None, "function_calls": None},
            ],
            source="x",
        ),
        asks=r"`functions` is not read.*ignore: \[messages.functions\]",
    ),
    "OpenThoughts Agent": Shape(
        rows=shapes(
            conversations=chat(),
            agent="terminus-2",
            model="m",
            model_provider="p",
            date="2026-04-18",
            task="t",
            episode="episode-1",
            run_id="r",
            trial_name="n",
            result=None,
            verifier_output=None,
        ),
        trains=FOUR,
    ),
    "When2Call, preferences": Shape(
        rows=shapes(tools=[json.dumps(PLAIN_TOOL)], messages=[USER], chosen_response=SAID, rejected_response=WORSE),
        asks="no assistant turn",
    ),
    "OpenThoughts 3": Shape(
        rows=shapes(difficulty=7, source="x", domain="math", conversations=[HUMAN, GPT]), trains=FOUR
    ),
    "Nemotron code": Shape(
        rows=shapes(
            input=Q,
            output=A,
            category="code",
            license="cc",
            reasoning="on",
            generator="m",
            version="v1",
            system_prompt="Be brief.",
        ),
        asks="`reasoning` is not read",
        may=FOUR,
    ),
    "ToolMind, rectified": Shape(
        rows=shapes(
            messages=json.dumps(
                [
                    USER,
                    {"role": "reasoning", "content": f"<think>{R}</think>"},
                    {"role": "answer", "content": f"<answer>{A}</answer>"},
                ]
            ),
            split="x",
        ),
        asks="wrong role: message 2 has 'reasoning'",
    ),
    "Hermes agent traces": Shape(
        rows=shapes(
            id="x",
            conversations=[HUMAN, GPT],
            tools=json.dumps([TOOL]),
            category="x",
            subcategory="y",
            task="Add the numbers",
        ),
        trains=FOUR,
    ),
    "SWE-rebench OpenHands": Shape(
        rows=shapes(
            trajectory_id="x",
            instance_id="y",
            repo="a/b",
            trajectory=[
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": CALL}],
                },
                {"role": "tool", "content": "4", "tool_call_id": "c"},
                SAID,
            ],
            tools=[TOOL],
            model_patch="diff --git a/x b/x and more words",
            exit_status="submit",
            resolved=1,
        ),
        asks=r"\{messages: trajectory, tools: tools\}",
        may=[*sft(CALLED), *FOUR],
    ),
    "Opus reasoning": Shape(
        rows=shapes(
            id="x", problem=Q, thinking=R, solution=A, difficulty="hard", category="math", timestamp="2026", hash="ab"
        ),
        asks="`thinking` is not read.*reasoning_content",
        may=[*FOUR, *REASONED],
    ),
    "ReasonSet": Shape(
        rows=shapes(problem=Q, working_out=R, provided_solution=A), asks="working_out", may=[*FOUR, *sft(R), *REASONED]
    ),
    "When2Call, updated": Shape(
        rows=shapes(prompt=[USER], answer=A, conversations=chat(), text=f"{Q} {A}"), asks="conversations", may=FOUR
    ),
    "Nemotron Cascade": Shape(
        rows=[
            {"messages": chat(), "category": "swe", "source": "x", "generator": "m", "thinking": True},
            {"messages": chat(), "category": "swe", "source": "x", "generator": "m", "thinking": False},
        ],
        asks="`thinking`",
        may=FOUR,
    ),
}
"""Data sets of 2025 and 2026."""
