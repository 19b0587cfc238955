/* Speaks lines with one of flite's CMU voices and says what flite knows about each.
 *
 *   phones VOICE WAVE STRETCH < lines > records        VOICE slt or rms, WAVE 0 or 1, STRETCH a factor of durations
 *
 * A record, little-endian: uint32 phones, pitch frames, samples; for each phone uint8 number, uint8 "a word begins",
 * uint16 end in milliseconds; for each 5 ms uint16 pitch in tenths of a hertz; int16 samples at 16 kHz if WAVE is 1.
 * A line that flite cannot speak gives a record of three zeros. Phones are numbered as in tools/speaker/codec.py.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <flite/flite.h>
#include <flite/cst_cart.h>
#include <flite/cst_cg.h>
#include <flite/cst_regex.h>

#define LINE_BYTES 16384

cst_voice *register_cmu_us_slt(const char *folder);
cst_voice *register_cmu_us_rms(const char *folder);

static const char *const PHONES[] = {
    "pau", "aa", "ae", "ah", "ao", "aw", "ax", "ay", "b", "ch", "d", "dh", "eh", "er", "ey", "f", "g", "hh", "ih", "iy", "jh",
    "k", "l", "m", "n", "ng", "ow", "oy", "p", "r", "s", "sh", "t", "th", "uh", "uw", "v", "w", "y", "z", "zh", "axr"};

static int with_wave;

/* Most of the time goes into the wave, and into smoothing what it is made of. The linker puts these functions in the
 * place of flite's own (--wrap). */
cst_wave *__real_mlsa_resynthesis(const cst_track *, const cst_track *, cst_cg_db *, cst_audio_streaming_info *, int);
cst_wave *__wrap_mlsa_resynthesis(const cst_track *params, const cst_track *strengths, cst_cg_db *db,
                                  cst_audio_streaming_info *stream, int mode)
{
    if (with_wave)
        return __real_mlsa_resynthesis(params, strengths, db, stream, mode);
    cst_wave *silence = new_wave();
    cst_wave_resize(silence, 1, 1);
    cst_wave_set_sample_rate(silence, 16000);
    silence->samples[0] = 0;
    return silence;
}

cst_track *__real_mlpg(const cst_track *, cst_cg_db *);
cst_track *__wrap_mlpg(const cst_track *params, cst_cg_db *db)
{
    return with_wave ? __real_mlpg(params, db) : new_track();
}

/* The rest goes into trees, two of which are walked for each frame of 5 ms. Their questions are about the frame or, most
 * of them, about the state that it belongs to: answers are kept as long as that stays the same. flite asks anew. */
#define OF_STATE "R:mcep_link.parent."
#define MOST 512
struct kept {
    const cst_item *item;
    int count;
    struct {
        const char *question;
        cst_val *answer;
    } all[MOST];
};
static struct kept of_state, of_frame;

static void forget(struct kept *kept, const cst_item *item)
{
    while (kept->count)
        delete_val(kept->all[--kept->count].answer);
    kept->item = item;
}

static const cst_val *answer_to(const char *question, cst_item *item, struct kept *kept)
{
    for (int i = 0; i < kept->count; i++)
        if (kept->all[i].question == question)
            return kept->all[i].answer;
    if (kept->count == MOST)
        forget(kept, kept->item);
    kept->all[kept->count].question = question;
    return kept->all[kept->count++].answer = val_inc_refcount(ffeature(item, question));
}

static int says(const cst_val *answer, const cst_cart_node *node)
{
    switch (node->op) {
    case CST_CART_OP_IS: return val_equal(answer, node->val);
    case CST_CART_OP_LESS: return val_less(answer, node->val);
    case CST_CART_OP_GREATER: return val_greater(answer, node->val);
    case CST_CART_OP_IN: return val_member(answer, node->val);
    case CST_CART_OP_MATCHES: return cst_regex_match(cst_regex_table[val_int(node->val)], val_string(answer));
    }
    fprintf(stderr, "phones: a tree of flite has an unknown question %d\n", node->op);
    exit(1);
}

const cst_val *__wrap_cart_interpret(cst_item *item, const cst_cart *tree)
{
    const cst_item *state = item_parent(item_as(item, "mcep_link"));
    if (!state || of_frame.item != item) /* what is no frame may change between two questions */
        forget(&of_frame, item);
    if (state && of_state.item != state)
        forget(&of_state, state);
    const cst_cart_node *node = tree->rule_table;
    while (node->op != CST_CART_OP_LEAF) {
        const char *question = tree->feat_table[node->feat];
        int common = state && strncmp(question, OF_STATE, strlen(OF_STATE)) == 0;
        const cst_val *answer = answer_to(question, item, common ? &of_state : &of_frame);
        node = says(answer, node) ? node + 1 : tree->rule_table + node->no_node;
    }
    return node->val;
}

/* flite's audio output, which a static program would need ALSA for and which is never used here. */
void *audio_open_alsa(unsigned rate, int channels, int format) { (void)rate, (void)channels, (void)format; return NULL; }
int audio_close_alsa(void *device) { (void)device; return -1; }
int audio_write_alsa(void *device, void *samples, int bytes) { (void)device, (void)samples, (void)bytes; return -1; }
int audio_flush_alsa(void *device) { (void)device; return -1; }
int audio_drain_alsa(void *device) { (void)device; return -1; }

static void put16(unsigned value)
{
    uint16_t two = (uint16_t)value;
    fwrite(&two, sizeof two, 1, stdout);
}

static unsigned number_of(const char *phone)
{
    for (unsigned i = 0; i < sizeof PHONES / sizeof *PHONES; i++)
        if (strcmp(PHONES[i], phone) == 0)
            return i;
    fprintf(stderr, "phones: flite has a phone %s that the codec lacks\n", phone);
    exit(1);
}

static int begins_word(const cst_item *segment)
{
    const cst_item *inside = item_as(segment, "SylStructure");
    return inside && item_parent(inside) && !item_prev(inside) && !item_prev(item_parent(inside));
}

static void put_record(cst_utterance *said)
{
    uint32_t sizes[3] = {0, 0, 0};
    if (!said) {
        fwrite(sizes, sizeof sizes, 1, stdout);
        return;
    }
    const cst_item *first = relation_head(utt_relation(said, "Segment"));
    const cst_val *params = feat_val(said->features, "param_track");
    const cst_track *track = params ? val_track(params) : NULL;
    const cst_wave *wave = utt_wave(said);
    for (const cst_item *segment = first; segment; segment = item_next(segment))
        sizes[0]++;
    sizes[1] = track ? (uint32_t)track->num_frames : 0;
    sizes[2] = with_wave && wave ? (uint32_t)wave->num_samples : 0;
    fwrite(sizes, sizeof sizes, 1, stdout);
    for (const cst_item *segment = first; segment; segment = item_next(segment)) {
        putchar((int)number_of(item_feat_string(segment, "name")));
        putchar(begins_word(segment));
        put16((unsigned)(item_feat_float(segment, "end") * 1000 + 0.5f));
    }
    for (uint32_t i = 0; i < sizes[1]; i++)
        put16(track->frames[i][0] > 0 ? (unsigned)(track->frames[i][0] * 10) : 0);
    if (sizes[2])
        fwrite(wave->samples, sizeof(short), sizes[2], stdout);
    delete_utterance(said);
}

int main(int count, char **arguments)
{
    if (count != 4 || (strcmp(arguments[1], "slt") && strcmp(arguments[1], "rms"))) {
        fprintf(stderr, "usage: phones slt|rms 0|1 STRETCH < lines > records\n");
        return 2;
    }
    flite_init();
    with_wave = atoi(arguments[2]);
    cst_voice *voice = strcmp(arguments[1], "slt") ? register_cmu_us_rms(NULL) : register_cmu_us_slt(NULL);
    feat_set_float(voice->features, "duration_stretch", (float)atof(arguments[3]));
    static char line[LINE_BYTES];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        put_record(flite_synth_text(line, voice));
        forget(&of_frame, NULL);
        forget(&of_state, NULL);
    }
    return fflush(stdout) ? 1 : 0;
}
