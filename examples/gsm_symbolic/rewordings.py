"""Each template of the world in other words: same values, same question, same answer, another text.

The names in braces are those of the template's values (`templates.Template.names`). Every number and every word that
decides the answer stands exactly once, as in the package's own text.
"""

REWORDINGS = {
    0: "How many minutes in all does {name} need for {total_amount} {food}s if she peels {peel_rate} {food}s every "
    "minute and then cooks them in a pan that takes {batch_size} {food}s at a time, each panful needing "
    "{time_per_batch} minutes?",
    1: "{name} takes out toys while she looks after her {family}: {blocks} building blocks from a bag, {animals} "
    "stuffed animals from a bin, and a tower of {rings} stacking rings. A tube of bouncy balls that she just "
    "bought brings the number of toys to {total}. How many balls are in that tube?",
    3: "At first {name} had {initial_pals} pen pals, but he stopped writing to {lost_pals} of them. Every one of the"
    " others sends him {letters_per_week} letters a week, each {pages_per_letter} pages long, and he answers with"
    " letters just as long and as many. One page takes him {minutes_per_page} minutes. How many hours a week does"
    " he write?",
    4: "In her {location}, {name} keeps {num_jars} jars of {items}, and one jar is enough for {per_jar} {food}s. She"
    " bakes until she has used up all {items}. A {container} takes {per_pan} {food}s. How many {container}s does "
    "she fill?",
    5: "Two sisters from {city}, {name1} and {name2}, ask {celebrity_type} for autographs every afternoon of their "
    "{vacation_type}. {n1} weeks have gone by, and {name1} has {s1} signatures while {name2} has {s2}. There are "
    "{n2} weeks left, and together they would like to own {goal} signatures. How many are still missing?",
    7: "On each of the {num_ledges} window ledges of her house {name} has {plants_per_ledge} potted plants. "
    "Yesterday the nursery brought her {plants_received} more. Tomorrow she gives away {plants_to_give} plants "
    "from every ledge. How many plants will she have after that?",
    8: "For her {drink}, {name} takes teaspoons of sugar and cups of water in the ratio {sugar_ratio}:{water_ratio}."
    " Teaspoons and cups add up to {total_items}. How many teaspoons of sugar are in it?",
    9: "With {num_bills} {currency}{bill_value} bills in his pocket, {name} goes shopping. He takes {num_items1} "
    "{item1}s, each for {currency}{price1}, and {num_items2} packs of {item2}s, each for {currency}{price2}. How "
    "much money does he keep?",
    10: "{name2} is the {relation_type} of {name1}, who is now {age1} years old. {years} years from now, {name2} will"
    " be {mult} times the present age of {name1}. What is the age of {name2} today?",
    12: "During the {period}, {name} finished {num1} {game1}s, each in {time1} minutes, as well as {num2} {game2}s, "
    "each in {time2} minutes. How many minutes of play is that?",
    13: "{park_name} has two large waterslides. On the biggest one, which measures {length1} {unit}, people move at "
    "{speed1} {unit}/minute. The second biggest one measures {length2} {unit}, and being steeper it lets them "
    "move at {speed2} {unit}/minute. By how many minutes is the ride on the biggest one longer?",
    16: "On {platform}, {name2} has fewer friends than the others: {name1} has {mult1} times as many as {name2}, and "
    "{name3} has {mult2} times as many as {name2}. The friends of {name1} number {n}. What is the number of "
    "friends of {name3}?",
    18: "In a game of {game}, {name2} got {n2} points more than {frac:.0%} of what {name1} got. {name1} got {n1} "
    "points. What do their points add up to?",
    20: "{name} wants to lay out {total} {obj}s. He has {num_trays} {surface}s with room for {capacity} {obj}s each. "
    "How many {obj}s are left over when every {surface} is full?",
    23: "If {name} did {task} on her own, it would cost her {hours} hours of {work_type} work that pays "
    "{currency}{rate} per hour. An {profession} would do it for {currency}{fee}. By how much is she better off "
    "with the {profession}?",
    24: "It takes Comet {comet_name} {orbit_period} years to go round the sun. The {relative} of {name} was "
    "{relative_age} when he saw it. When {name} saw it for the second time, he was {multiple} times as old as "
    "that. At what age did {name} see it first?",
    25: "You want to eat at most {total_target} calories today, and {consumed} calories are already eaten. A serving "
    "of {food} has {calories} calories, and a bag of {size} {unit} holds {servings} servings. How many {unit} may"
    " you still eat?",
    26: "A juggler has {n} balls, of which {frac_1:.0%} are {ball_type} balls. Of those {ball_type} balls, "
    "{frac_2:.0%} are {color}. What is the number of {color} {ball_type} balls?",
    29: "The dog of {name1} had {n1} puppies and {k1} of those are spotted. The dog of {name2} had {n2} puppies and "
    "{k2} of those are spotted. Taking all puppies together, what percentage is spotted?",
    30: "Everyone in a {group} of {n} students has one favourite hobby. {n_1} of them {hobby1}, {n_2} play {hobby2}, "
    "and all others {hobby3} or {hobby4}. Twice as many {hobby4} as play {hobby2}. How many {hobby3}?",
    34: "For the {event}, {total} {item} were hidden. Each of the two {family} twins came back with {n} {item}, and "
    "{m} {item} were never found. Friends of the twins found all the rest. How many {item} did those friends "
    "find?",
    38: "{name} has {count} grandchildren of the same size, who are {child_type}. For each of them she knits a "
    "{item1} from {n1} skeins of wool, a {item2} from {n2}, a {item3} from {n3}, a pair of {item4} from {n4} and "
    "a pair of {item5} from {n5}. How many skeins does she have to buy?",
    39: "{school_name} School has {total} {grade}-graders, and {num_girls} of these are girls. {absent_girls} of the "
    "girls and {absent_boys} of the boys in {grade} grade were missing on {day}. How many boys of that grade came"
    " to school on {day}?",
    40: "The cards of a {item} come in three colors. {n1} of them are {c1}. The number of {c2} ones is {p}% higher. "
    "There are as many {c3} cards as {c1} and {c2} ones together. How many cards is that in all?",
    41: "A {event} costs {currency}{total}. {name} has {currency}{current} of his own, and the {organization} has "
    "promised to pay {fraction} of the cost. How much does {name} still have to find?",
    43: "Compared with his {relation}, who has {k} fewer {item}s, a {person1} is rich: he has {n} {item}s. How many "
    "{item}s do the two own in all?",
    44: "A {store} sells balls. It has {n1} {color1} ones at {currency}{p1} each, {n2} {color2} ones at "
    "{currency}{p2} each and {n3} {color3} ones at {currency}{p3} each. How much money comes in if every ball is "
    "sold?",
    48: "At the {shop} you pay {currency}{price1} for a loaf of {item1} and {currency}{price2} for a {item2}. What is"
    " the difference between the price of {n1} such loaves and the price of {n2} {item2}s?",
    50: "Within one hour, {name} put together half of a puzzle of {pieces1} pieces and then a whole puzzle of "
    "{pieces2} pieces. How many pieces did he lay?",
    54: "The way of {name1} and {name2} to the {location1} must not take more than {total_time} minutes. They need "
    "{library_time} minutes to the corner with the {location2}, and from there {station_time} minutes to the "
    "{location3}. How many minutes do they have for the rest of the way?",
    57: "Each student of a school does one sport. {n1} play {sport1}, twice as many play {sport2}, and {sport3} is "
    "played by {n2} boys and {n3} girls. What is the number of students?",
    58: "{name} empties {num_containers} {container}s of {liquid}. Every {container} holds {volume} {unit}s, and one "
    "{unit} of {liquid} has {calories} calories. How many calories did he take in?",
    59: "Fog comes in from the ocean and needs {time_per_interval} minutes for every {distance_per_interval} miles. "
    "From the water to its far edge the city measures {total_distance} miles. After how many minutes is all of "
    "the city in fog?",
    62: "{name1} eats {slices_per_day} {unit} of a {item} every day, and {name2} eats {multiplier} times that much. "
    "The {item} has {num_slices} {unit}. After how many days is it gone?",
    67: "On {d1}, {name} harvests {n1} {fruit}s, and on {d2} another {n2}. On {d3} he harvests {mult} times as many "
    "{fruit}s as on {d1}. How many {fruit}s is that altogether?",
    69: "The {document} that {name} has to hand in must have {total_pages} pages. So far she has {fraction} of it. "
    "How many pages are still to be written?",
    71: "How much did {name} pay at the {shop} for {item} if she took {n1} dozen {item1} at ${p1} a dozen, {n2} dozen"
    " {item2} at ${p2} a dozen and {n3} dozen {item3} at ${p3} a dozen?",
    72: "{total} {obj}s went into a {structure}. {n1} of these are {color1}, {mult} times that number are {color2}, "
    "and the rest are {color3}. How many {color3} {obj}s were used?",
    78: "{name2} is {age_diff} years older than {name1}. {name1} is {age1}. What is the mean of the two ages?",
    80: "The thread of {name} is wound on spools. Light {color1}: {n1} spools. Dark {color1}: {n2} spools. Light "
    "{color2}: {n3} spools. Dark {color2}: {n4} spools. What percentage of the spools is {color1}?",
    81: "How much does a {occupation} make in a year if a day of work brings him {currency}{pay_per_day}, and he "
    "works {days_per_week} days a week in {weeks_per_month} weeks of every month?",
    82: "Of the {num_emails} emails that reach {name} every day, {no_response_percent}% need no answer, and he "
    "answers all others. How many emails does he answer in a week of {workdays} work days?",
    88: "The {venue} in which {school} celebrates graduation seats {total} people. {graduates} seats are for the "
    "graduates and {faculty} for the faculty. The graduates share the other seats equally among their guests. How"
    " many tickets does each graduate get?",
    91: "The {fruit} field of {name} measures {field_size} {area}s and carries {density} {fruit}s on each {area}. It "
    "can be harvested once every {months} months. How many {fruit}s does it give in a year?",
    95: "{name1} and his family like {food}. He eats {n1} of them every {time_unit}, {name2} eats {n2}, and their "
    "{relation} eats {n3}. How many {food} do they eat together in one {time_period}?",
    96: "{name} has {k1} {animal1}s and {k2} {animal2}s to feed with {food}. A {animal1} gets {n1} {unit}. A "
    "{animal2} gets twice as much as a {animal1}, less {n2} {unit}. How many {unit} of {food} does he need?",
}
