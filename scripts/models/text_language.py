# ruff: noqa: RUF001
"""The model `text_language`: recognition of 24 languages.

A naive Bayes classifier over character n-grams. Trained on the n-gram counts (one to three
characters, from Wikipedia) that the package langdetect 1.0.9 ships as its language profiles;
Apache License 2.0, copyright 2010-2014 Cybozu Labs, 2014-2015 Michal Danilak. SENTENCES, written
for this project, only measure it.

How standard ONNX operators count n-grams: StringSplit gives, next to the pieces, their number, and
a text split at "ing" has one more piece than it has "ing". So there is one StringSplit per n-gram.
Languages with a script of their own are told by RegexFullMatch on that script.
"""

import importlib.util
import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from scripts.models.onnx_file import BATCH, run, save

NAMES = ("text_language",)

# Languages of one script are distinguished by n-grams more frequent in one than in the other.
SHARED_SCRIPTS = (
    ("cs", "da", "de", "en", "es", "fi", "fr", "hu", "it", "nl", "pl", "pt", "ro", "sv", "tr"),
    ("ru", "uk"),
)
BY_NGRAMS = SHARED_SCRIPTS[0] + SHARED_SCRIPTS[1]
LANGUAGES = tuple(sorted((*BY_NGRAMS, "ar", "el", "he", "hi", "ja", "ko", "zh")))

# Evidence of one character for the languages of its script, in units of SCRIPT_EVIDENCE.
# Japanese uses Chinese characters, too, but hardly a sentence without kana.
SCRIPTS: dict[str, dict[str, float]] = {
    r"\p{Arabic}": {"ar": 1},
    r"\p{Cyrillic}": {"ru": 1, "uk": 1},
    r"\p{Devanagari}": {"hi": 1},
    r"\p{Greek}": {"el": 1},
    r"\p{Han}": {"zh": 1, "ja": 0.5},
    r"\p{Hangul}": {"ko": 1},
    r"\p{Hebrew}": {"he": 1},
    r"\p{Hiragana}\p{Katakana}": {"ja": 1},
}
SCRIPT_EVIDENCE = math.log(1000)

NGRAMS_PER_PAIR = 20  # of languages that share a script
SMOOTHING = 1e-6  # added to every relative frequency; the profiles leave out rare n-grams
OVERLAP = 4  # n-grams overlap, so that neighbours repeat the same evidence

# The profiles write these letters with a cedilla; Romanian texts should have a comma below.
OTHER_SPELLINGS = str.maketrans("şţ", "șț")


def build(repository: Path) -> None:
    ngrams, evidence = train(read_profiles())
    counts = [f"pieces_{index}" for index in range(len(ngrams))]
    found = [f"script_{index}" for index in range(len(SCRIPTS))]
    nodes = [
        # A space at both ends, so that the first and the last word are delimited like the others.
        helper.make_node("StringConcat", ["space", "text"], ["started"]),
        helper.make_node("StringConcat", ["started", "space"], ["padded"]),
        *(
            helper.make_node("StringSplit", ["padded"], [f"unused_{count}", count], delimiter=ngram)
            for ngram, count in zip(ngrams, counts, strict=True)
        ),
        helper.make_node("Concat", counts, ["pieces"], axis=1),
        helper.make_node("Sub", ["pieces", "one"], ["occurrences"]),
        helper.make_node("Cast", ["occurrences"], ["ngrams"], to=TensorProto.FLOAT),
        *(
            helper.make_node("RegexFullMatch", ["text"], [name], pattern=f"(?s).*[{script}].*")
            for script, name in zip(SCRIPTS, found, strict=True)
        ),
        helper.make_node("Concat", found, ["found"], axis=1),
        helper.make_node("Cast", ["found"], ["scripts"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["ngrams", "scripts"], ["features"], axis=1),
        helper.make_node("MatMul", ["features", "evidence"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ReduceMax", ["probabilities", "axis"], ["confidence"], keepdims=1),
        helper.make_node("ArgMax", ["probabilities"], ["index"], axis=1, keepdims=1),
        helper.make_node("Gather", ["languages", "index"], ["language"]),
    ]
    save(
        repository / "text_language" / "1" / "model.onnx",
        nodes,
        {"text": (TensorProto.STRING, (BATCH, 1))},
        {
            "language": (TensorProto.STRING, (BATCH, 1)),
            "confidence": (TensorProto.FLOAT, (BATCH, 1)),
        },
        {
            "space": np.array([" "], dtype=object),
            "one": np.array(1, np.int64),
            "evidence": np.concatenate([evidence, script_evidence()]).astype(np.float32),
            "axis": np.array([1], np.int64),
            "languages": np.array(LANGUAGES, dtype=object),
        },
        opset=20,  # the first with StringConcat, StringSplit and RegexFullMatch
    )


def read_profiles() -> dict[str, dict[str, float]]:
    """Relative frequencies of n-grams by language, among the n-grams of the same length."""
    package = importlib.util.find_spec("langdetect")
    if package is None or package.origin is None:
        sys.exit("text_language is trained on data of the package langdetect 1.0.9: install it")
    frequencies = {}
    for language in BY_NGRAMS:
        path = Path(package.origin).parent / "profiles" / language
        profile = json.loads(path.read_text(encoding="utf-8"))
        totals = profile["n_words"]  # of one, two and three characters
        frequencies[language] = {
            ngram: count / totals[len(ngram) - 1]
            for ngram, count in profile["freq"].items()
            if ngram.strip()
        }
    return frequencies


def train(frequencies: dict[str, dict[str, float]]) -> tuple[list[str], np.ndarray]:
    """Choose n-grams; their rows are the evidence of an occurrence for each language."""
    ngrams = sorted({ngram for profile in frequencies.values() for ngram in profile})
    likely = SMOOTHING + np.array(
        [[frequencies[language].get(ngram, 0.0) for language in BY_NGRAMS] for ngram in ngrams]
    )
    logs = np.log(likely)
    chosen: set[int] = set()
    for group in SHARED_SCRIPTS:
        columns = [BY_NGRAMS.index(language) for language in group]
        for this in columns:
            for other in columns:
                # Frequent in this language, and above all rarer in the other.
                gain = likely[:, this] * np.maximum(logs[:, this] - logs[:, other], 0) ** 2
                if this != other:
                    chosen.update(np.argsort(-gain, kind="stable")[:NGRAMS_PER_PAIR].tolist())
    rows = sorted(chosen)

    evidence = np.zeros((len(rows), len(LANGUAGES)))
    columns = [LANGUAGES.index(language) for language in BY_NGRAMS]
    evidence[:, columns] = (logs - logs.mean(axis=1, keepdims=True))[rows] / OVERLAP
    return with_other_spellings([ngrams[row] for row in rows], evidence)


def with_other_spellings(ngrams: list[str], evidence: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Add other spellings of the n-grams, with the same evidence."""
    respelt = {row: ngram.translate(OTHER_SPELLINGS) for row, ngram in enumerate(ngrams)}
    extra = [row for row, ngram in respelt.items() if ngram != ngrams[row]]
    return ngrams + [respelt[row] for row in extra], np.concatenate([evidence, evidence[extra]])


def script_evidence() -> np.ndarray:
    rows = [[units.get(language, 0.0) for language in LANGUAGES] for units in SCRIPTS.values()]
    return np.array([[SCRIPT_EVIDENCE * units for units in row] for row in rows])


def labelled() -> tuple[np.ndarray, np.ndarray]:
    """SENTENCES as a column, as the model takes them, and the language of each."""
    pairs = [(text, language) for language, texts in SENTENCES.items() for text in texts]
    texts, languages = np.array(pairs, dtype=object).T
    return texts[:, None], languages


def probes() -> dict[str, dict[str, np.ndarray]]:
    """Inputs on which two builds of a model can be compared, by model name."""
    return {"text_language": {"text": labelled()[0]}}


def report(repository: Path) -> list[str]:
    """The accuracy on SENTENCES, and what was taken for what."""
    texts, languages = labelled()
    outputs = run(repository / "text_language" / "1" / "model.onnx", {"text": texts})
    guesses = outputs["language"][:, 0]
    hits, count = int((guesses == languages).sum()), len(languages)
    confused = Counter(pair for pair in zip(languages, guesses, strict=True) if pair[0] != pair[1])
    return [
        f"text_language/1: {hits} of {count} sentences, {hits / count:.2%}",
        *(f"  {times} {pair[0]} taken for {pair[1]}" for pair, times in sorted(confused.items())),
    ]


# Each language says the same eight things.
SENTENCES: dict[str, tuple[str, ...]] = {
    "ar": (
        "أين تقع أقرب محطة للقطار من هنا؟",
        "اشتريت كتابا جديدا من المكتبة أمس.",
        "الطقس جميل اليوم والسماء صافية.",
        "أخي يعمل مهندسا في شركة كبيرة.",
        "نتناول العشاء معا كل يوم جمعة.",
        "لا أعرف متى ستصل الرسالة إلى المدينة.",
        "يحب الأطفال اللعب في الحديقة بعد المدرسة.",
        "من فضلك أغلق الباب عندما تخرج.",
    ),
    "cs": (
        "Kde je prosím nejbližší nádraží?",
        "Včera jsem si v obchodě koupil novou knihu.",
        "Dnes je krásné počasí a svítí slunce.",
        "Můj bratr pracuje jako inženýr ve velké firmě.",
        "Každý pátek večeříme společně s přáteli.",
        "Nevím, kdy ten dopis konečně dorazí.",
        "Děti si po škole rády hrají na zahradě.",
        "Až budeš odcházet, zavři za sebou dveře.",
    ),
    "da": (
        "Hvor ligger den nærmeste banegård?",
        "I går købte jeg en ny bog i butikken.",
        "Vejret er dejligt i dag, og solen skinner.",
        "Min bror arbejder som ingeniør i et stort firma.",
        "Vi spiser aftensmad sammen hver fredag.",
        "Jeg ved ikke, hvornår brevet kommer frem.",
        "Børnene kan godt lide at lege i haven efter skole.",
        "Luk venligst døren, når du går.",
    ),
    "de": (
        "Wo ist der nächste Bahnhof, bitte?",
        "Gestern habe ich im Laden ein neues Buch gekauft.",
        "Das Wetter ist heute schön und die Sonne scheint.",
        "Mein Bruder arbeitet als Ingenieur in einer großen Firma.",
        "Jeden Freitag essen wir zusammen zu Abend.",
        "Ich weiß nicht, wann der Brief ankommen wird.",
        "Die Kinder spielen nach der Schule gern im Garten.",
        "Bitte mach die Tür zu, wenn du gehst.",
    ),
    "el": (
        "Πού είναι ο πιο κοντινός σταθμός του τρένου;",
        "Χθες αγόρασα ένα καινούργιο βιβλίο.",
        "Ο καιρός είναι όμορφος σήμερα.",
        "Ο αδελφός μου δουλεύει σε μια μεγάλη εταιρεία.",
        "Κάθε Παρασκευή τρώμε όλοι μαζί.",
        "Δεν ξέρω πότε θα φτάσει το γράμμα.",
        "Τα παιδιά παίζουν στον κήπο μετά το σχολείο.",
        "Κλείσε την πόρτα όταν φύγεις, σε παρακαλώ.",
    ),
    "en": (
        "Where is the nearest train station, please?",
        "Yesterday I bought a new book in the shop.",
        "The weather is lovely today and the sun is shining.",
        "My brother works as an engineer for a large company.",
        "We have dinner together every Friday evening.",
        "I do not know when the letter will arrive.",
        "After school the children like to play in the garden.",
        "Please shut the door when you leave.",
    ),
    "es": (
        "¿Dónde está la estación de tren más cercana?",
        "Ayer compré un libro nuevo en la tienda.",
        "Hoy hace buen tiempo y brilla el sol.",
        "Mi hermano trabaja como ingeniero en una gran empresa.",
        "Todos los viernes cenamos juntos.",
        "No sé cuándo va a llegar la carta.",
        "A los niños les gusta jugar en el jardín.",
        "Cierra la puerta cuando salgas, por favor.",
    ),
    "fi": (
        "Missä on lähin rautatieasema?",
        "Eilen ostin kaupasta uuden kirjan.",
        "Tänään on kaunis ilma ja aurinko paistaa.",
        "Veljeni on töissä insinöörinä suuressa yrityksessä.",
        "Syömme yhdessä illallista joka perjantai.",
        "En tiedä, milloin kirje saapuu perille.",
        "Lapset leikkivät mielellään puutarhassa koulun jälkeen.",
        "Sulje ovi, kun lähdet.",
    ),
    "fr": (
        "Où se trouve la gare la plus proche ?",
        "Hier, j'ai acheté un nouveau livre au magasin.",
        "Il fait beau aujourd'hui et le soleil brille.",
        "Mon frère travaille comme ingénieur dans une grande entreprise.",
        "Nous dînons ensemble tous les vendredis.",
        "Je ne sais pas quand la lettre arrivera.",
        "Après l'école, les enfants aiment jouer dans le jardin.",
        "Fermez la porte en partant, s'il vous plaît.",
    ),
    "he": (
        "איפה נמצאת תחנת הרכבת הקרובה?",
        "אתמול קניתי ספר חדש בחנות.",
        "מזג האוויר יפה היום והשמש זורחת.",
        "אחי עובד כמהנדס בחברה גדולה.",
        "אנחנו אוכלים יחד בכל יום שישי.",
        "אני לא יודע מתי המכתב יגיע.",
        "הילדים אוהבים לשחק בגינה אחרי בית הספר.",
        "בבקשה תסגור את הדלת כשאתה יוצא.",
    ),
    "hi": (
        "सबसे नज़दीकी रेलवे स्टेशन कहाँ है?",
        "कल मैंने दुकान से एक नई किताब खरीदी।",
        "आज मौसम बहुत अच्छा है।",
        "मेरा भाई एक बड़ी कंपनी में काम करता है।",
        "हम हर शुक्रवार को साथ में खाना खाते हैं।",
        "मुझे नहीं पता कि चिट्ठी कब आएगी।",
        "बच्चे स्कूल के बाद बगीचे में खेलते हैं।",
        "जाते समय दरवाज़ा बंद कर देना।",
    ),
    "hu": (
        "Hol van a legközelebbi vasútállomás?",
        "Tegnap vettem egy új könyvet a boltban.",
        "Ma szép idő van, és süt a nap.",
        "A bátyám mérnökként dolgozik egy nagy cégnél.",
        "Minden pénteken együtt vacsorázunk.",
        "Nem tudom, mikor érkezik meg a levél.",
        "A gyerekek iskola után szívesen játszanak a kertben.",
        "Kérlek, csukd be az ajtót, amikor elmész.",
    ),
    "it": (
        "Dov'è la stazione ferroviaria più vicina?",
        "Ieri ho comprato un libro nuovo nel negozio.",
        "Oggi il tempo è bello e splende il sole.",
        "Mio fratello lavora come ingegnere in una grande azienda.",
        "Ogni venerdì ceniamo tutti insieme.",
        "Non so quando arriverà la lettera.",
        "Ai bambini piace giocare in giardino dopo la scuola.",
        "Chiudi la porta quando esci, per favore.",
    ),
    "ja": (
        "一番近い駅はどこですか。",
        "昨日、本屋で新しい本を買いました。",
        "今日は天気がいいですね。",
        "兄は大きな会社でエンジニアとして働いています。",
        "毎週金曜日に一緒に夕食を食べます。",
        "手紙がいつ届くか分かりません。",
        "子供たちは放課後、庭で遊ぶのが好きです。",
        "出るときはドアを閉めてください。",
    ),
    "ko": (
        "가장 가까운 기차역이 어디에 있습니까?",
        "어제 가게에서 새 책을 샀어요.",
        "오늘은 날씨가 정말 좋네요.",
        "형은 큰 회사에서 기술자로 일합니다.",
        "우리는 매주 금요일에 함께 저녁을 먹어요.",
        "편지가 언제 도착할지 모르겠습니다.",
        "아이들은 방과 후에 마당에서 놀기를 좋아해요.",
        "나갈 때 문을 닫아 주세요.",
    ),
    "nl": (
        "Waar is het dichtstbijzijnde station?",
        "Gisteren heb ik in de winkel een nieuw boek gekocht.",
        "Het is vandaag mooi weer en de zon schijnt.",
        "Mijn broer werkt als ingenieur bij een groot bedrijf.",
        "Elke vrijdag eten we samen.",
        "Ik weet niet wanneer de brief zal aankomen.",
        "Na school spelen de kinderen graag in de tuin.",
        "Doe de deur dicht als je weggaat, alsjeblieft.",
    ),
    "pl": (
        "Gdzie jest najbliższy dworzec kolejowy?",
        "Wczoraj kupiłem w sklepie nową książkę.",
        "Dzisiaj jest ładna pogoda i świeci słońce.",
        "Mój brat pracuje jako inżynier w dużej firmie.",
        "W każdy piątek jemy razem kolację.",
        "Nie wiem, kiedy dojdzie ten list.",
        "Po szkole dzieci lubią bawić się w ogrodzie.",
        "Proszę zamknąć drzwi przy wychodzeniu.",
    ),
    "pt": (
        "Onde fica a estação de trem mais próxima?",
        "Ontem comprei um livro novo na loja.",
        "Hoje o tempo está bonito e faz sol.",
        "O meu irmão trabalha como engenheiro numa grande empresa.",
        "Todas as sextas-feiras jantamos juntos.",
        "Não sei quando a carta vai chegar.",
        "Depois da escola, as crianças gostam de brincar no jardim.",
        "Feche a porta quando sair, por favor.",
    ),
    "ro": (
        "Unde este cea mai apropiată gară?",
        "Ieri am cumpărat o carte nouă din magazin.",
        "Astăzi vremea este frumoasă și strălucește soarele.",
        "Fratele meu lucrează ca inginer la o firmă mare.",
        "În fiecare vineri luăm cina împreună.",
        "Nu știu când va ajunge scrisoarea.",
        "Copiilor le place să se joace în grădină după școală.",
        "Te rog să închizi ușa când pleci.",
    ),
    "ru": (
        "Где находится ближайший вокзал?",
        "Вчера я купил в магазине новую книгу.",
        "Сегодня хорошая погода и светит солнце.",
        "Мой брат работает инженером в большой компании.",
        "Каждую пятницу мы ужинаем вместе.",
        "Я не знаю, когда придёт письмо.",
        "После школы дети любят играть в саду.",
        "Закройте, пожалуйста, дверь, когда будете уходить.",
    ),
    "sv": (
        "Var ligger närmaste järnvägsstation?",
        "I går köpte jag en ny bok i affären.",
        "Det är vackert väder i dag och solen skiner.",
        "Min bror arbetar som ingenjör på ett stort företag.",
        "Vi äter middag tillsammans varje fredag.",
        "Jag vet inte när brevet kommer fram.",
        "Barnen tycker om att leka i trädgården efter skolan.",
        "Stäng dörren när du går, är du snäll.",
    ),
    "tr": (
        "En yakın tren istasyonu nerede?",
        "Dün dükkândan yeni bir kitap aldım.",
        "Bugün hava çok güzel ve güneş parlıyor.",
        "Kardeşim büyük bir şirkette mühendis olarak çalışıyor.",
        "Her cuma akşamı birlikte yemek yeriz.",
        "Mektubun ne zaman geleceğini bilmiyorum.",
        "Çocuklar okuldan sonra bahçede oynamayı sever.",
        "Çıkarken lütfen kapıyı kapat.",
    ),
    "uk": (
        "Де знаходиться найближчий вокзал?",
        "Учора я купив у крамниці нову книжку.",
        "Сьогодні гарна погода і світить сонце.",
        "Мій брат працює інженером у великій компанії.",
        "Щоп'ятниці ми вечеряємо разом.",
        "Я не знаю, коли прийде лист.",
        "Після школи діти люблять гратися в саду.",
        "Зачиніть, будь ласка, двері, коли йтимете.",
    ),
    "zh": (
        "请问最近的火车站在哪里？",
        "昨天我在商店买了一本新书。",
        "今天天气很好，阳光明媚。",
        "我哥哥在一家大公司当工程师。",
        "我們每個星期五一起吃晚飯。",
        "我不知道信什么时候会到。",
        "孩子們放學後喜歡在花園裡玩。",
        "离开的时候请把门关上。",
    ),
}
