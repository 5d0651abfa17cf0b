package operation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// maxAnswers bounds a journal; an operation has a few questions.
	maxAnswers  = 64
	maxWarnings = 32
	maxOptions  = 16
)

// Question is for a person, or for a program that answers for a person.
type Question struct {
	ID   string // unique in its step
	Text string
	// Options are the answers that are taken, such as yes and no; none: any text.
	Options []string
	// Timeout is how long an answer is waited for. Never 0.
	Timeout time.Duration
	// Default is the answer if there is none in time; "": the step fails.
	Default string
}

// Asked is a question that is open.
type Asked struct {
	Question
	Step  string
	Since time.Time
}

// asked is a question, and the channel for its answer.
type asked struct {
	Asked
	answer chan string
}

// Progress is what a step uses to report, and to ask questions.
type Progress struct {
	x        *execution
	step     string
	part     string // "": the step as a whole
	deadline *pausable
}

// Report adds a line about what the step does to the events.
func (p *Progress) Report(format string, args ...any) {
	p.x.report(p.step, p.part, fmt.Sprintf(format, args...))
}

// Ask asks a question, and waits for its answer. An answer that the journal has, also
// from before a restart of the node, is returned again. One question at a time.
func (p *Progress) Ask(ctx context.Context, q Question) (string, error) {
	if !nameForm.MatchString(q.ID) || q.Text == "" || q.Timeout <= 0 || len(q.Options) > maxOptions {
		return "", fmt.Errorf("question %q needs an ID, a text and a timeout, and has at most %d options", q.ID, maxOptions)
	}
	open := &asked{Asked: Asked{Question: q, Step: p.step, Since: time.Now()}, answer: make(chan string, 1)}
	if text, known, err := p.x.open(open); known || err != nil {
		return text, err
	}
	defer p.x.close(open)
	defer p.deadline.pause()()
	select {
	case text := <-open.answer:
		return text, nil
	case <-ctx.Done():
		return "", context.Cause(ctx)
	case <-time.After(q.Timeout):
	}
	if q.Default != "" {
		// It fails after an answer in the last moment, which counts then.
		_ = p.x.answer(q.ID, q.Default, "nobody, within "+q.Timeout.String())
	}
	select {
	case text := <-open.answer:
		return text, nil
	default:
		return "", fmt.Errorf("nobody has answered %q within %s", q.Text, q.Timeout)
	}
}

// open puts a question, unless its answer is known.
func (x *execution) open(q *asked) (text string, known bool, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, a := range x.rec.Answers {
		if a.Step == q.Step && a.Question == q.ID {
			return a.Text, true, nil
		}
	}
	if x.asked != nil {
		return "", false, fmt.Errorf("question %q: %q is still open", q.ID, x.asked.ID)
	}
	if len(x.rec.Answers) >= maxAnswers {
		return "", false, fmt.Errorf("question %q: an operation asks at most %d", q.ID, maxAnswers)
	}
	x.asked = q
	text = q.Text
	if len(q.Options) > 0 {
		text += " [" + strings.Join(q.Options, "/") + "]"
	}
	x.tell(stamped([]Event{{Kind: Asks, Step: q.Step, Text: text}})...)
	x.publish()
	return "", false, nil
}

func (x *execution) close(q *asked) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.asked == q {
		x.asked = nil
		x.publish()
	}
}

// Answer answers the question of an operation. The journal has the answer before the
// step gets it.
func (r *Runner) Answer(id, question, text, by string) error {
	x, err := r.find(id)
	if err != nil {
		return err
	}
	return x.answer(question, text, by)
}

func (x *execution) answer(question, text, by string) error {
	var open *asked
	return x.commit(func(next *record) ([]Event, error) {
		x.mu.Lock()
		open = x.asked
		x.mu.Unlock()
		if open == nil || open.ID != question {
			return nil, refuse("operation %s doesn't ask %q (any more): gbctl operation list shows what it waits for", x.id, bounded(question))
		}
		if len(open.Options) > 0 && !slices.Contains(open.Options, text) {
			return nil, refuse("operation %s: %q isn't an answer: it must be one of %s", x.id, bounded(text), strings.Join(open.Options, ", "))
		}
		if len(text) > maxText || text == "" {
			return nil, refuse("operation %s: an answer has 1 to %d bytes, and this one %d", x.id, maxText, len(text))
		}
		next.Answers = append(next.Answers, answer{Step: open.Step, Question: question, Text: text, By: by, Time: time.Now()})
		return []Event{{Kind: Answered, Step: open.Step, Text: fmt.Sprintf("%s, by %s", text, by)}}, nil
	}, func() {
		x.asked = nil       // it may have ended meanwhile
		open.answer <- text // has room for it
	})
}
