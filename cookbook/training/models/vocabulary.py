"""Comparison of a teacher's tokens with the student's, by their files."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from cookbook.config.objectives import Question
from cookbook.facts.model_files import read_tokenizer, why_not
from cookbook.system.files import RecipeError
from cookbook.training.models.folder_facts import check_folder


def common_rows(
    folder: Path, config: PreTrainedConfig, question: Question, tokenizer: Any, num_rows: int | None
) -> int:
    """The number of tokens that teacher and student both score: the rows of the smaller embedding. A larger one has
    rows that belong to no token, as Qwen2.5's with 151,936 and 152,064 rows.

    Args:
        folder, config: of the teacher.
        tokenizer: of the student.
        num_rows: of the student's embedding.

    Raises:
        RecipeError: other tokens, or fewer of them than the recipe wants.
    """
    place = f"objective.teacher is {question.teacher!r}"
    try:
        vocabulary = read_tokenizer(folder).get_vocab()
    except (OSError, ValueError) as error:
        raise RecipeError(f"{place}: {why_not('tokenizer', error)}") from None
    facts = check_folder(folder, config, place=place)
    of_teacher = facts.num_embeddings or config.get_text_config().vocab_size
    of_student = num_rows or of_teacher
    rows, own = min(of_teacher, of_student), tokenizer.get_vocab()
    mistakes = []
    if own != vocabulary:
        mistakes.append(f"{place}: its vocabulary is not the student's: {_difference(vocabulary, own)}; {SAME}")
    elif (last := max(own.values())) >= of_teacher:
        token = tokenizer.convert_ids_to_tokens(last)
        mistakes.append(f"{place}: its embedding has {of_teacher:,} rows, and token {last} ({token}) none; {SAME}")
    most = rows - (of_student > of_teacher)  # or all of the student's rows that the teacher lacks would be impossible
    if question.top_k > most:
        sizes = f"the teacher scores {of_teacher:,} tokens and the student {of_student:,}"
        mistakes.append(f"objective.loss_top_k is {question.top_k}, and {sizes}; write at most {most:,}")
    if mistakes:
        raise RecipeError(mistakes)
    return rows


SAME = "take a teacher with the student's tokenizer"


def _difference(teacher: dict[str, int], student: dict[str, int]) -> str:
    """The first difference of two vocabularies, for the user."""
    if len(teacher) != len(student):
        return f"{len(teacher):,} tokens, and {len(student):,}"
    at = min(teacher[token] for token in teacher if student.get(token) != teacher[token])
    other = next((token for token, number in student.items() if number == at), None)
    token = next(token for token, number in teacher.items() if number == at)
    return f"token {at} is {token!r}, and {other!r}"
