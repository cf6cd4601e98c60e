"""Words that starters are made of: subjects, people, places, things, numbers. All of our own writing."""

from __future__ import annotations

from typing import Final


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What texts and questions are about.
SUBJECTS: Final = _lines("""
    the history of glassmaking
    beekeeping in cities
    the migration of arctic terns
    how tides work
    volcanic islands
    sourdough bread
    the invention of the telescope
    coral reefs and warming seas
    medieval guilds
    night trains in Europe
    the water cycle
    solar panels on old houses
    learning to play the cello
    the Silk Road
    honey and its uses
    earthquakes and building codes
    the human immune system
    street food in Bangkok
    the printing press
    electric bicycles
    deep sea exploration
    the fall of the Roman Republic
    growing tomatoes on a balcony
    the moons of Jupiter
    a village library that was saved
    public transport in growing cities
    how vaccines are made
    the art of calligraphy
    marathon training for beginners
    the domestication of dogs
    plastic waste in rivers
    the Great Barrier Reef
    chess openings
    the discovery of penicillin
    wind power at sea
    the Inca road system
    family budgets
    how batteries store energy
    the life of a lighthouse keeper
    noise in open offices
    the rise of podcasts
    a flood in a mountain valley
    school meals
    photosynthesis
    the history of the bicycle
    sleep and memory
    small language models
    a strike of dock workers
    forest fires and how they spread
    the Ottoman Empire
    jazz in New Orleans
    the economy of fishing villages
    renewable energy storage
    the first railway across a continent
    allergies in children
    rooftop gardens
    the geology of canyons
    how search engines rank pages
    wolves returning to central Europe
    ancient Egyptian medicine
    a new bridge over a wide river
    the psychology of habits
    online privacy
    cheese making in the Alps
    the Apollo missions
    space debris
    knitting as a hobby
    the causes of inflation
    the structure of DNA
    football in small towns
    a data leak at a hospital
    the Renaissance in Florence
    crop rotation
    camping with small children
    the ozone layer
    remote work
    the human heart
    monsoons
    the theatre of Shakespeare's time
    choosing a first guitar
    the abolition of slavery
    machine translation
    mangrove forests
    the history of tea
    urban foxes
    black holes
    an election in a small country
    the ethics of zoos
    recycling of old phones
    the Vikings in North America
    first aid at home
    the gut microbiome
    tourism and historic town centres
    the invention of paper
    self-driving buses
    whales and their songs
    a record heat wave
    vegetarian cooking
    the Industrial Revolution
    teenage sleep
    how airplanes fly
    a museum of everyday things
    drought and farming
    time management
    the Berlin Wall
    learning a language as an adult
    bats and their echoes
    the price of rent
    microchips
    the Aztec calendar
    a storm that closed an airport
    meditation
    the history of maps
    3D printing in medicine
    the Amazon rainforest
    stage fright
    the silk moth
    public libraries
    the physics of rainbows
    a merger of two car makers
    cycling across a desert
    the French Revolution
    diabetes
    wooden skyscrapers
    the origins of writing
    penguins
    quantum computers
    a coach who changed a team
    dental health
    insulating an old house
    the Mongol Empire
    color blindness
    floating wind turbines
    weekend markets
    the hearing of owls
    how bridges carry loads
    job interviews
    the Panama Canal
    antibiotic resistance
    hydrogen as a fuel
    a rescue at sea
    the Enlightenment
    comets
    the history of chocolate
    volunteering abroad
    the nervous system
    ski resorts without snow
    a start-up that repairs shoes
    ancient Greek democracy
    mushrooms
    encryption
    the Harlem Renaissance
    snow leopards
    desalination
    the life of bees in winter
    a court ruling on data protection
    hiking in the rain
    the theory of evolution
    working night shifts
    the aurora borealis
    the Suez Canal
    music therapy
    oil spills
    baking without an oven
    the Ming dynasty
    a wage agreement for nurses
    tsunamis
    how the eye sees
    bonsai trees
    the Cold War
    vertical farms
    the decline of insects
    paragliding
    the Magna Carta
    supply chains
    dinosaurs with feathers
    a lottery winner who kept working
    vitamins
    reading to children
    tunnels under the sea
    the history of vaccines
    desert plants
    opera for beginners
    the Persian Empire
    artificial limbs
    stray cats
    a cyber attack on a city council
    gravity
    pottery
    the plague in the Middle Ages
    saving for retirement
    glaciers
    the first computers
    hummingbirds
    food labels
    the Meiji Restoration
    a ceasefire after long talks
    river dams
    probability in daily life
    swimming lessons
    the Great Depression
    satellites
    ants and their colonies
    a hospital that ran out of beds
    folk tales
    cloud computing
    salt
    the Ottoman siege of Vienna
    running shoes
    smartwatches and health
    a train that was stuck for a night
    the history of zero
    earthworms
    lunar calendars
    stock markets
    the Trojan War
    fashion made from old clothes
    peat bogs
    a trade deal between two continents
    acoustics of concert halls
    the immune response to pollen
    trams
    mountain rescue
    the Underground Railroad
    kites
    how refrigerators work
    sharks
    the cost of childcare
    open source software
    a drug trial that failed
    the Bauhaus school
    cellular respiration
    lighthouses
    school uniforms
    the Zulu Kingdom
    weather forecasts
    perfume
    a pilot project for a basic income
    stars and how they die
    gardening for bees
    the Olympic Games in antiquity
    spices
    neural networks
    flamingos
    the rules of cricket
    a factory that moved back home
    barter and money
    soap
    rock climbing
    the Maya civilization
    caffeine
    an oil tanker that ran aground
    migration in the nineteenth century
    shadows and sundials
    stem cells
    a theatre group in a prison
    truffles
    the Treaty of Westphalia
    electric cars in winter
    seagulls in towns
    a school without grades
    laughter
    caves
    kidney transplants
    the history of the pencil
    the Byzantine Empire
    cork
    radio astronomy
    a mayor who resigned
    crosswords
    the carbon cycle
    salmon
    the partition of India
    silence
    a phone ban in schools
    windmills
    hibernation
    tattoos
    the Congress of Vienna
    lithium mining
    marriage customs
    a shortage of teachers
    juggling
    enzymes
    ferries
    the Rosetta Stone
    artificial sweeteners
    an airline that went bankrupt
    clouds
    friendship in old age
    the gold rush
    octopuses
    parking in cities
    superconductors
    a dog that found its way home
    folk dance
    concrete
    the Hanseatic League
""")

NAMES: Final = _words("""
    Amara Anton Beatriz Bilal Carla Chen Dana Dmitri Elif Emeka Farah Felix Greta Goran Hana Hugo Ines Ivan Jonas
    Julia Karim Katya Leila Lars Mina Marco Nadia Nils Olga Omar Petra Paulo Quentin Rosa Ravi Sofia Samir Tara
    Tomas Uma Viktor Wanda Xenia Yusuf Yara Zoe Zoran Abel Bianca Cosima Dario Esther Fiona Gustav Helena Isak
    Jamila Kofi Lena Mateo Noor Otto Priya Renate Selma Theo Ursula Vera Willem Ye-jin Agnes Boris Clara Dinesh
    Edith Fritz Gloria Hector Irma
""")

SURNAMES: Final = _words("""
    Abara Berg Castillo Dvorak Eriksen Fontaine Grieg Haddad Ivanova Jansen Kimura Lindqvist Moreau Nakamura Okafor
    Petrov Quist Rahman Sandoval Takeda Ueda Varga Weiss Yilmaz Zeller Adeyemi Brandt Conti Diallo Engel
""")

PLACES: Final = _words("""
    Lisbon Tallinn Nairobi Osaka Lima Bergen Ghent Cusco Accra Turin Kyoto Porto Riga Tunis Quito Graz Leeds Malmo
    Perth Seville Tbilisi Utrecht Valencia Wellington Xi'an Zagreb Aarhus Bologna Cardiff Dakar Esfahan Freiburg
    Galway Hanoi Izmir Jaipur Krakow Lyon Montreal Naples Odense Pune Rostock Sofia Toledo Uppsala Vilnius Winnipeg
    York Zurich
""")

COUNTRIES: Final = _lines("""
    Portugal
    Norway
    Kenya
    Japan
    Peru
    Estonia
    Vietnam
    Morocco
    New Zealand
    Canada
    Argentina
    Ghana
    Turkey
    Mongolia
    Hungary
    Chile
    South Korea
    Iceland
    Ethiopia
    Indonesia
    Poland
    Egypt
    Brazil
    Nepal
    Austria
    Senegal
    Finland
    Bolivia
    Jordan
    Ireland
    Thailand
    Greece
    Mexico
    Tanzania
    Denmark
    Georgia
    Cuba
    Malaysia
    Sweden
    Uruguay
""")

THINGS: Final = _lines("""
    apples
    pencils
    eggs
    bottles of water
    bricks
    books
    tickets
    stickers
    candles
    chairs
    cups of flour
    marbles
    tomatoes
    postcards
    light bulbs
    bags of rice
    buttons
    tulips
    loaves of bread
    shirts
    batteries
    oranges
    notebooks
    tiles
    cookies
    jars of honey
    lemons
    plates
    seashells
    coins
""")

ROLES: Final = _lines("""
    a lighthouse keeper in a storm
    a museum guide who has seen it all
    a grumpy wizard who runs a bakery
    a patient maths teacher
    an old ship's captain
    a detective in a small fishing town
    a robot that has just learned to cook
    a medieval blacksmith
    a sports commentator
    a travel agent for time travellers
    a doctor who explains everything with food
    a park ranger
    the moon
    a chess grandmaster
    a librarian of a magic library
    a strict but fair editor
    a gardener who talks to plants
    an astronaut on the way to Mars
    a lawyer in ancient Rome
    a cat that rules the house
    a chef in a busy restaurant
    a retired spy
    a weather forecaster from the year 2150
    a friendly bus driver
    a philosopher in a market square
    a pirate who is afraid of water
    a news anchor
    a kind grandmother
    a football coach before the final
    a tailor for giants
""")

AUDIENCES: Final = _lines("""
    a child of eight
    a teenager
    a new colleague
    someone who has never heard of it
    a university student
    my grandfather
    a busy manager
    a tourist
    a curious neighbour
    an engineer
    beginners
    a school class
""")

FORMS: Final = _lines("""
    short story
    poem
    limerick
    haiku
    letter to the editor
    product description
    speech of two minutes
    diary entry
    advertisement
    film review
    scene for a play
    newsletter
    thank-you note
    fairy tale
    song text
    job advertisement
    cover letter
    blog post
    press release
    radio report
    dialogue
    opening paragraph of a novel
    social media post
    toast for a party
    complaint to a company
    invitation
    book review
    motivational speech
    list of tips
    travel guide entry
""")

TONES: Final = _lines("""
    funny
    serious
    warm
    formal
    mysterious
    simple
    persuasive
    sad
    hopeful
    matter-of-fact
    playful
    dramatic
    polite
    ironic
""")

LANGUAGES: Final = ("Python", "JavaScript", "Java", "C", "C++", "Rust", "Go", "SQL", "Bash", "TypeScript", "Ruby")

TASKS: Final = _lines("""
    checks whether a string is a palindrome
    returns the n largest numbers of a list
    counts how often each word occurs in a text
    merges two sorted lists
    removes duplicates but keeps the order
    finds the longest common prefix of some words
    converts Roman numerals to integers
    reverses a linked list
    validates an email address
    computes the factorial of a number
    finds all prime numbers up to n
    rotates a matrix by ninety degrees
    parses a date such as 2024-05-17
    flattens a nested list
    computes the greatest common divisor
    sorts people by age and then by name
    reads a CSV file and sums a column
    checks whether brackets are balanced
    implements a queue with two stacks
    finds the shortest path in a grid
    implements binary search
    computes Fibonacci numbers with memoization
    downloads a page and counts its links
    encodes text with a Caesar cipher
    finds the median of a list
    groups words that are anagrams of each other
    converts Celsius to Fahrenheit
    draws a triangle of stars
    implements a least recently used cache
    counts the islands in a grid of zeros and ones
    formats a number with thousands separators
    finds two numbers that add up to a target
    implements quicksort
    retries a request three times
    computes the number of days between two dates
    capitalizes every word of a sentence
    detects a cycle in a graph
    multiplies two matrices
    writes log lines to a file
    generates a random password
    finds the second smallest element
    splits a list into chunks of a given size
    computes compound interest
    prints a calendar of a month
    replaces all vowels with a star
    checks whether a year is a leap year
    inserts a node into a binary search tree
    computes the moving average of a series
    compresses a string by counting repeats
    transposes a table
""")

CONCEPTS: Final = _lines("""
    supply and demand
    natural selection
    entropy
    recursion
    compound interest
    osmosis
    the placebo effect
    plate tectonics
    inertia
    the greenhouse effect
    opportunity cost
    a prime number
    an electric circuit
    the separation of powers
    a hash table
    the speed of light
    covalent bonds
    confirmation bias
    a limit in calculus
    game theory
    the Doppler effect
    mitosis
    federalism
    standard deviation
    Ohm's law
    metaphor
    blockchain
    friction
    the water table
    photosynthesis
    an algorithm
    magnetism
    a chemical catalyst
    correlation and causation
    comparative advantage
    the scientific method
    half-life
    buoyancy
    object-oriented programming
    the nitrogen cycle
    utilitarianism
    a derivative
    relativity
    gross domestic product
    genetic mutation
    antibodies
    the rule of law
    a binary number
    nuclear fission
    irony
    evaporation
    a neural network
    Bayes' theorem
    the electromagnetic spectrum
    monopoly
    existentialism
    the food chain
    the Pythagorean theorem
    an operating system
    surface tension
""")

INVENTIONS: Final = _lines("""
    the telephone
    the light bulb
    the steam engine
    dynamite
    the sewing machine
    the microscope
    the airplane
    the radio
    the thermometer
    the zipper
    the barometer
    the camera
    the compass
    the transistor
    the helicopter
    the parachute
    the battery
    the elevator
    the typewriter
    the World Wide Web
    the bicycle
    the pendulum clock
    the hot air balloon
    the vaccine against smallpox
    the X-ray machine
    the ballpoint pen
    the periodic table
    the telegraph
    the washing machine
    the submarine
""")

ANIMALS: Final = _words("""
    otter elephant falcon octopus tortoise dolphin wolf hedgehog eagle salmon giraffe beaver lizard penguin moose
    camel badger owl crocodile bee kangaroo seal spider lynx whale bat squirrel ostrich panda cheetah
""")

WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

JOBS: Final = _words("""
    nurse carpenter pilot teacher baker electrician lawyer gardener programmer plumber journalist dentist farmer
    architect translator mechanic librarian surgeon waiter accountant photographer fisherman biologist tailor
""")
