"""Templates of starters. `{subject}` and the like are filled from words.py; `{n:2-90}` is a number in these bounds.

A digit after the name makes the word the same wherever it stands in one starter: `{name1} ... {name1}`. All of our own
writing; none is taken from a benchmark.
"""

from __future__ import annotations

from typing import Final


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


WRITING: Final = _lines("""
    Write a {tone} {form} about {subject}.
    Write a {form} about {subject} for {audience}.
    Compose a {tone} {form} in which {name} and {name} talk about {subject}.
    I need a {form} about {subject}. Keep it {tone} and under {n:60-200} words.
    Draft an email from {name1} to {name2} at {surname} & Sons. {name1} has to say that the order of {n:20-400} {things} will be late, and why.
    Draft a {tone} email in which {name} asks the team in {place} for news about {subject}.
    Help me write a {form}: it should begin with the words "Nobody in {place} expected" and be about {subject}.
    Write a {tone} story of three paragraphs. The hero is {role}, the place is {place}.
    Describe {place} on a rainy {weekday} morning in a {tone} way.
    Write a review of a restaurant in {place} whose speciality is {things}. {name} was not amused.
    Give me five titles for a {form} about {subject}.
    Write an outline for an essay on {subject}, with three main points.
    Write an essay about {subject} and {subject}.
    Continue this story: {name1} opened the box and found nothing but {n:2-40} {things} and a ticket to {place}.
    Write a conversation between a {job} and a {job} who meet on a train to {place}.
    Rewrite this in a {tone} tone: "We are sorry, but the {weekday} tour to {place} is full. Try again next week."
    Compare {subject} and {subject} in one {tone} paragraph.
    Write instructions for {audience}: how to get started with {subject}.
    Write a {tone} poem in which {concept} meets {animal1}, a {animal1} from {country}.
    What should I say in a speech about {subject}? I have {n:2-15} minutes and the listeners are {audience}.
    Plan a weekend in {place} for {name} and {n:2-8} friends who like {subject}.
    Make a table of three pros and three cons of {subject}.
    Write a cover letter for {name1} {surname}, a {job} with {n:2-30} years of experience who wants to work in {place}.
    Make a weekly meal plan for a {job} who trains for a race and likes {things}.
""")

ROLEPLAY: Final = _lines("""
    Imagine you are {role}. What do you think of {subject}?
    You are {role}. Tell {audience} about {subject}.
    Act as {role} and answer: why should anybody care about {subject}?
    Pretend to be {role}. {name} asks you how to become a {job}. What do you say?
    Play the part of {role} who has to explain {concept} to {audience}.
    Speak as {role}: what was the best day of your life?
    Be {role} and give me advice: I have lost my {n:2-9} {things} in {place}.
    As {role}, describe your morning in {place}.
    From now on you are {role}. Describe {invention} to me as if you saw it for the first time.
    Let us play a game. You are {role}, I am a {job} from {country}. You begin.
""")

REASONING: Final = _lines("""
    {name1} is older than {name2}. {name2} is older than {name3}. Who is the youngest?
    {name1} sits to the left of {name2}, and {name3} sits to the right of {name2}. Who sits in the middle?
    If today is {weekday}, what day will it be in {n:3-40} days? Explain.
    All {animal}s in the house are brown. Is every brown animal in the house of that kind? Explain your reasoning.
    {name1} has {n:2-6} brothers, and each of them has one sister. How many sisters can {name1} have? Think step by step.
    A box holds {n:3-9} red and {n:3-9} blue {things}. How many must you take out without looking to be sure of two of one color?
    A train leaves {place} at {n:6-11} o'clock and needs {n:2-9} hours. {name} has to be at the other end by {weekday} noon. What else do you need to know?
    Which one does not belong, and why: {animal}, {animal}, {job}, {animal}?
    {name1} says that {name2} lies. {name2} says that both tell the truth. Who can be right?
    A farmer has a {animal}, a {animal} and a sack of {things} and one small boat. How would you get them across the river?
    Is it a good argument that {subject} must be bad because {name} from {place} dislikes it? Explain.
    {name} put {n:3-20} {things} into a bag at noon and took {n:1-3} out each hour. Is the bag empty by evening? Show your reasoning.
    What would happen if {concept} did not exist?
    Order these by size and say how you decided: a {animal}, a {animal}, a grain of salt, {place}.
    If it rains, the match in {place} is cancelled. The match was cancelled. Did it rain? Explain.
    {name1} runs faster than {name2} but slower than {name3}. {name4} is the slowest. Give the order of the four.
""")

MATH: Final = _lines("""
    {name1} has {n:5-90} {things1}. {name1} buys {n:2-60} more and gives {n:1-5} to {name2}. How many {things1} does {name1} have now?
    A shop sells {things1} at ${n:2-19} each. {name} buys {n:2-12} of them and pays with a ${n:50-500} note. How much change is there?
    {name1} reads {n:8-60} pages a day. The book has {n:120-900} pages. How many days does it take?
    A train covers {n:80-600} km in {n:2-8} hours. What is its average speed?
    {name} earns ${n:11-48} an hour and works {n:3-9} hours a day, {n:3-6} days a week. How much is that in {n:2-8} weeks?
    There are {n:4-30} rows of {n:6-40} {things} in a hall. {n:5-90} are broken. How many are whole?
    A recipe for {n:2-6} people needs {n:2-9} {things1}. How many {things1} are needed for {n:8-48} people?
    {name1} is {n:2-9} times as old as {name2}, who is {n:4-15}. How old will {name1} be in {n:3-20} years?
    A tank holds {n:200-2000} liters and loses {n:2-25} liters an hour. How much is left after {n:3-40} hours?
    The price of a coat was ${n:40-400}. It fell by {n:5-60} percent. What is the new price?
    {name1}, {name2} and {name3} share {n:30-600} {things} in the ratio {n:1-4} to {n:1-4} to {n:1-4}. How many does each get?
    A rectangle is {n:3-60} cm long and {n:2-40} cm wide. What are its area and its perimeter?
    Solve for x: {n:2-12}x + {n:1-60} = {n:61-200}.
    What is {n:12-99} times {n:11-99}? Show the steps.
    Compute ({n:10-90} + {n:10-90}) * {n:2-9} - {n:5-60}.
    What is {n:5-95} percent of {n:40-1200}?
    A farmer has {n:10-80} hens. Each lays {n:3-6} eggs a week. The eggs are sold by the dozen for ${n:2-7}. How much does the farmer make in {n:2-9} weeks?
    {name1} walks {n:2-9} km to school and back, {n:3-6} days a week. How far is that in {n:2-12} weeks?
    A bus starts with {n:10-50} people. At the first stop {n:2-9} get off and {n:2-20} get on. At the second, half of them get off. How many are left?
    Find the mean and the median of {n:2-40}, {n:2-40}, {n:2-40}, {n:2-40} and {n:2-40}.
    The sum of two numbers is {n:20-150} and their difference is {n:2-18}. What are they?
    A dice is thrown {n:2-4} times. How likely is it that every throw shows a number above {n:1-5}?
    If f(x) = {n:2-9}x^2 - {n:1-9}x + {n:1-20}, what is f({n:1-6})?
    {name1} saves ${n:15-120} each month and has ${n:100-900} already. When are there ${n:1000-4000}?
    {name1} painted {n:3-20} fences on {weekday}, twice as many on the next day, and {n:2-9} fewer on the day after. How many in all?
    A machine makes {n:20-300} {things} in {n:2-9} minutes. How many does it make in {n:1-8} hours?
    Simplify {n:2-12}(x - {n:1-9}) + {n:2-9}x.
    A circle has a radius of {n:2-30} cm. What is its area?
    {name1} had some {things1}. After giving away {n:4-40} and losing {n:2-20}, {n:3-60} were left. How many were there at first?
    Each of {n:3-12} classes has {n:15-32} pupils. A third of all pupils take the bus. How many is that?
""")

KNOWLEDGE: Final = _lines("""
    Explain {concept} to {audience}.
    What is {concept}? Give an example.
    What is the difference between {concept} and {concept}?
    Why does {subject} matter today?
    What do most people get wrong about {subject}?
    Describe how {invention} works.
    How did {invention} change daily life in {country}?
    What are the main causes and effects of {subject}?
    Tell me {n:3-7} facts about {subject}.
    How is {concept} used in practice? Give {n:2-5} examples.
    Give a short overview of {subject}, and then say what is still unknown.
    Which experiments or sources tell us about {subject}?
    Name three arguments for and three against this: "{subject} should be taught in every school".
    How would you teach {concept} in one lesson?
    What role does {concept} play in {subject}?
    Describe the geography and the climate of {country}.
    Summarize the history of {country} in one paragraph.
    What does a {job} do all day, and what does it take to become one?
    How do a {animal} and a {animal} differ in what they eat and where they live?
    Describe the steps by which {concept} was understood over time.
""")

QUESTIONS: Final = _lines("""
    who invented {invention}
    when was {invention} invented
    what is the capital of {country}
    what language do they speak in {country}
    how many people live in {place}
    where does the word for {animal} come from
    what do {animal}s eat
    how long does a {animal} live
    what is {concept}
    who discovered {concept}
    which country does {place} belong to
    when did {subject} begin
    what is {subject} known for
    why is {subject} important
    what is the currency of {country}
    how far is it from {place} to {place}
    what does a {job} earn in {country}
    what is the highest mountain in {country}
    how fast can a {animal} move
    what are the three parts of {concept}
    who is the most famous {job} of {country}
    where do {animal}s sleep
    when did {country} become independent
    how is {invention} made
    Who was the first {job} to write about {subject}?
    What is the largest city of {country}?
    Is {concept} the same as {concept}?
    What year did people in {place} first hear of {invention}?
    What sea is nearest to {place}?
    How many {things} fit into a box of one meter on each side?
    who wrote the first book about {subject}
    what is the difference between a {animal} and a {animal}
    when is the best time to visit {country}
    who played the {job} in the film about {subject}
    how many bones does a {animal} have
    where was the first museum of {subject} opened
    which {job} from {country} won a Nobel Prize
    how do you say {animal} in the language of {country}
    what happens to the body without {things}
    who was president of {country} in {n:1950-2020}
    who won the world cup in {n:1950-2020}
    where is the headquarters of the largest company of {country}
""")

CODE: Final = _lines("""
    Write a {language} function that {task}.
    Write a {language} program that {task}. Add comments.
    How do I write code in {language} that {task}? Explain each step.
    Show me the shortest {language} code that {task}.
    Write a function in {language} that {task}, and a test for it.
    I am new to {language}. Write code that {task} and explain it to {audience}.
    What is the time complexity of code that {task}? Show the code in {language}.
    Write a class in {language} for a {job} with a name, an age and a method that {task}.
    Explain the difference between {language} and {language} for someone who wants to write code that {task}.
    Write an HTML page with the title "{place}" and a list of {n:3-6} facts about {subject}.
    Write a SQL query that finds all customers from {place} who bought more than {n:2-50} {things}.
    Write a regular expression for {language} that matches a date in {country}, and explain it.
""")

EXTRACTION: Final = _lines("""
    Extract all names and places: "On {weekday}, {name1} {surname} flew from {place} to {place} to meet {name2} {surname}, who has lived there for {n:2-30} years."
    List the numbers in this text and what they count: "{name1} sold {n:20-90} {things} at ${n:2-9} each, {n:3-19} fewer than {name2}, who sold {things} as well."
    Turn this into JSON with the keys name, job, age and city: {name1} {surname} is a {job}, {n:20-70} years old, and lives in {place}.
    Make a table with the columns city, day and temperature: {place}, {weekday}, {n:2-35} degrees; {place}, {weekday}, {n:2-35} degrees; {place}, {weekday}, {n:2-35} degrees.
    Is this review positive or negative? "The {things} came late, two were broken, but {name} at the shop in {place} was very kind." Say why.
    Which of these sentences are about {subject1}? 1. {name} bought {n:2-9} {things}. 2. A book about {subject1} came out in {place}. 3. {name} is a {job}.
    Give the total for each person: {name1} paid {n:5-60} and {n:5-60}; {name2} paid {n:5-60}; {name3} paid {n:5-60} and {n:5-60}. Answer as CSV.
    Sort these people by age, the oldest first: {name} ({n:18-90}), {name} ({n:18-90}), {name} ({n:18-90}), {name} ({n:18-90}).
    Correct the grammar: "{name} go to {place} on {weekday} and buyed {n:2-9} {things} for the {job}."
    Fill in the form. Name, date, reason. "Hello, this is {name1} {surname}. I cannot come on {weekday} because my {animal} is ill."
    Find the main claim in this text and rate it from 1 to 5: "{place} needs more {things}. Since {name} {surname} became mayor, there are only {n:2-80} left."
    Classify each as animal, place or job: {animal}, {place}, {job}, {animal}, {job}, {country}.
""")

# Said after an answer, whatever it was.
SECOND_TURNS: Final[dict[str, tuple[str, ...]]] = {
    "writing": _lines("""
        Make it shorter.
        Rewrite it so that it is more {tone}.
        Now write it from the point of view of a {job}.
        Change the ending.
        Rewrite your answer without the letter "z", as a list.
        Add a part about {subject}.
        Give it a better title and explain why it is better.
        Rewrite it for {audience}.
        Turn it into a {form}.
        What could be improved in your text?
        Begin every sentence with the next letter of the alphabet.
        Use a metaphor in each sentence.
    """),
    "roleplay": _lines("""
        And what would you say to {audience}?
        What are you most afraid of?
        How would {name}, a {job}, see that?
        Tell me more, but as a {tone} {form}.
        What do you think of {subject}?
        What would you change if you could start again?
    """),
    "reasoning": _lines("""
        Are you sure? Check it once more.
        What if there was one more person, {name}?
        Explain it to {audience}.
        How would the answer change if it were {weekday}?
        Which assumption did you make?
    """),
    "math": _lines("""
        And if all the numbers were doubled?
        Check your result in another way.
        Now the same with {n:3-40} instead of the first number.
        Explain the steps to {audience}.
        What is that rounded to the nearest ten?
        Divide the result by {n:2-9}.
    """),
    "knowledge": _lines("""
        Give an example from daily life.
        Explain it in one sentence.
        What is the strongest argument against it?
        How does it relate to {subject}?
        Explain it to {audience}.
        What should I read next?
        Which questions are still open?
        Write a short quiz about it with {n:3-5} questions.
    """),
    "code": _lines("""
        Now write it in {language}.
        How can it be made faster?
        Add a check for wrong input.
        Write {n:2-4} tests for it.
        Explain the code line by line.
        Is there a mistake in it?
    """),
    "extraction": _lines("""
        Now as JSON.
        Now as a table in Markdown.
        Which of them comes first in the alphabet?
        Add a line for {name} {surname} from {place}.
        How many items are that?
    """),
}

# What the target writes, to be read and asked about afterwards.
ARTICLES: Final = _lines("""
    Write a newspaper article about {subject}. Begin with the place, {place}, and quote {name} {surname}, a {job}.
    Write a long news report about {subject} in {country}. Give names, numbers and two quotes.
    Write a news story: on {weekday}, something unexpected happened in {place} that has to do with {subject}.
    Write a detailed report of {name} {surname}'s visit to {place}, where {subject} was discussed.
    Write a sports report about a match between {place} and {place} that ended {n:0-5} to {n:0-5}, with quotes of the coach, {surname}.
    Write a court report from {place}: a {job}, {name} {surname}, {n:19-70}, is accused of stealing {n:100-900} {things}.
    Write an interview with {name} {surname}, a {job} who knows everything about {subject}.
    Write an article about a study from {country} on {subject}, with its method, its results and a critic's view.
    Write a story of a family from {place} that lost its home and came to {country}.
    Write a business report: a company from {place} that makes {things} has a new owner.
    Write a report on an accident near {place} and on the work of the rescue teams.
    Write a long article for a travel magazine about {place} and {subject}.
""")
PASSAGES: Final = _lines("""
    Write an encyclopedia entry of one paragraph about {subject}.
    Write a short paragraph with facts about {subject1}: when, where, who.
    Write a short encyclopedia paragraph about {place}.
    Write a short encyclopedia paragraph about {invention}.
    Write a paragraph from a school book about {concept}.
    Write a short paragraph about the {animal}: its habitat, food and size.
    Write a short encyclopedia paragraph about {country}.
    Write a paragraph about the history of {subject}, with dates.
    Write an encyclopedia paragraph about {subject} in {country}.
    Write an encyclopedia paragraph about {name} {surname}, a {job} from {place}.
    Write a short paragraph about a film in which {name} {surname} plays a {job}. Name the year, the director and the cast.
    Write a short paragraph about a song about {subject}: who sang it, and when it was released.
    Write an encyclopedia paragraph about a river in {country}.
    Write a short paragraph about a television series with {role}. Say how many seasons it has.
    Write a paragraph about a sports club from {place}: its founding, its stadium, its titles.
    Write a paragraph about a law of {country} that has to do with {subject}.
    Write an encyclopedia paragraph about a company from {place} that makes {things}.
    Write a short paragraph about an illness that a {job} may get: causes, signs, treatment.
    Write a paragraph about a holiday that is celebrated in {country}.
    Write an encyclopedia paragraph about a war or treaty in the history of {country}.
""")
ASKING: Final = _lines("""
    List five questions that a curious person could ask about {subject}.
    Write five short questions about {subject}, easy ones first.
    Write five quiz questions about {country}. Only the questions.
    List five things that people would like to know about {concept}, as questions.
    What are five questions that {audience} would ask about {subject}? Number them.
    Write five tasks that somebody could give an assistant who knows about {subject}. Number them.
    Write five different requests that a {job} could send to an AI assistant. Number them.
    List five questions that people type into a search engine about {invention}.
    Write five questions about famous people from {country}. Only the questions.
    Write five trivia questions about {animal}s and {subject}. Do not give the answers.
""")
PROBLEMS: Final = _lines("""
    Write a math word problem about {things} and {name}. Do not solve it.
    Write a math word problem for grade {n:3-8} about {subject}. Only the problem, not the solution.
    Make up a problem in which {name} has to add and multiply. It should be about a {job} in {place}. No solution.
    Write a word problem with three steps about buying {things} and {things}. Do not give the answer.
    Write a word problem about speed and time with {name} and {name} on the way to {place}. Do not solve it.
    Write a word problem with percentages about a {job}. Do not solve it.
""")

# Asked of a text that the target has written. {text} is that text, or several.
SUMMARIES: Final = _lines("""
    Summarize the following text.\\n\\n{text}
    {text}\\n\\nSummarize the text above in {n:2-4} sentences.
    Summarize this article: {text}
    {text}\\n\\nWhat are the main points? Give a short summary.
    Write a summary of this news article in your own words:\\n{text}
    Article:\\n{text}\\n\\nSummary:
    Shorten this text to one paragraph:\\n\\n{text}
    Give me the three key facts of this text as a list.\\n\\n{text}
    Read this and write one headline and one sentence about it.\\n\\n"{text}"
    Please sum up what happened:\\n{text}
""")
ABOUT_TEXT: Final = _lines("""
    {text}\\n\\nQuestion: {question}
    Answer the question from the text.\\n\\nText: {text}\\n\\nQuestion: {question}\\nAnswer:
    Use the following information to answer. {question}\\n\\n{text}
    Context:\\n{text}\\n\\nWith the help of the context above, answer this: {question}
    Here are some documents:\\n\\n{text}\\n\\nBased on them, {question}
    {question}\\n\\nThese search results may help:\\n{text}
    You are given some passages. Answer from them only.\\n{text}\\n\\nQ: {question}\\nA:
    I found these notes:\\n{text}\\n\\n{question}
""")
TEXT_QUESTIONS: Final = _lines("""
    What is this mainly about?
    Who is named in the text, and why?
    When and where does this take place?
    What is the most surprising fact?
    Which numbers are given, and what do they mean?
    Why does it matter?
    What happened first, and what happened then?
    What problem is described, and what is done about it?
    How does the text explain it?
    What can be said about {subject}?
""")
# {topic}: what the last of several passages was written for.
PASSAGE_TASKS: Final = (
    "Tell me about {topic}.",
    "What do we learn here? {topic}",
    "{topic} In two sentences.",
    "Use it to do this: {topic}",
)
PASSAGE_LABELS: Final = ("Passage {i}: {t}", "[{i}] {t}", "Document {i}\\n{t}", "{t}", "({i}) {t}", "Source {i}: {t}")
