package operation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// maxAnswers bounds a journal; kubeadm's conversion, which asks most, asks a few.
	maxAnswers  = 64
	maxWarnings = 32
	maxOptions  = 16
)

// Question is for a person, or for who stands in for one.
type Question struct {
	ID   string // unique in its step
	Text string
	// Options are the answers that are taken, such as yes and no; none: any text.
	Options []string
	// Timeout is how long an answer is waited for. Never 0.
	Timeout time.Duration
	// Default is the answer when nobody gave one in time; "": the step fails.
	Default string
}

// Asked is a question that is open.
type Asked struct {
	Question
	Step  string
	Since time.Time
}

// asked is one with the way back to the step.
type asked struct {
	Asked
	answer chan string
}

// Progress is how a step talks to those who watch.
type Progress struct {
	l       *live
	step    string
	patient *patient
}

// Say tells what the step does, in a line.
func (p *Progress) Say(format string, args ...any) {
	p.l.say(p.step, fmt.Sprintf(format, args...))
}

// Ask asks a question, and waits for its answer. One that was given before, also
// before the node restarted, is given again. One at a time.
func (p *Progress) Ask(ctx context.Context, q Question) (string, error) {
	if !nameForm.MatchString(q.ID) || q.Text == "" || q.Timeout <= 0 || len(q.Options) > maxOptions {
		return "", fmt.Errorf("question %q needs an ID, a text and a timeout, and has at most %d options", q.ID, maxOptions)
	}
	open := &asked{Asked: Asked{Question: q, Step: p.step, Since: time.Now()}, answer: make(chan string, 1)}
	if text, known, err := p.l.open(open); known || err != nil {
		return text, err
	}
	defer p.l.close(open)
	defer p.patient.pause()()
	select {
	case text := <-open.answer:
		return text, nil
	case <-ctx.Done():
		return "", context.Cause(ctx)
	case <-time.After(q.Timeout):
	}
	if q.Default != "" {
		if err := p.l.answer(q.ID, q.Default, "nobody, within "+q.Timeout.String()); err == nil {
			return q.Default, nil
		}
	}
	select {
	case text := <-open.answer: // in the last moment
		return text, nil
	default:
		return "", fmt.Errorf("nobody has answered %q within %s", q.Text, q.Timeout)
	}
}

// open puts a question, unless its answer is known.
func (l *live) open(q *asked) (text string, known bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.rec.Answers {
		if a.Step == q.Step && a.Question == q.ID {
			return a.Text, true, nil
		}
	}
	if l.asked != nil {
		return "", false, fmt.Errorf("question %q: %q is still open", q.ID, l.asked.ID)
	}
	if len(l.rec.Answers) >= maxAnswers {
		return "", false, fmt.Errorf("question %q: an operation asks at most %d", q.ID, maxAnswers)
	}
	l.asked = q
	text = q.Text
	if len(q.Options) > 0 {
		text += " [" + strings.Join(q.Options, "/") + "]"
	}
	l.tell(stamped([]Event{{Kind: Asks, Step: q.Step, Text: text}})...)
	l.publish()
	return "", false, nil
}

func (l *live) close(q *asked) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asked == q {
		l.asked = nil
		l.publish()
	}
}

// Answer answers the question that an operation asks. The answer is in the journal
// before the step has it.
func (r *Runner) Answer(id, question, text, by string) error {
	l, err := r.find(id)
	if err != nil {
		return err
	}
	return l.answer(question, text, by)
}

func (l *live) answer(question, text, by string) error {
	return l.commit(func(next *record) ([]Event, error) {
		l.mu.Lock()
		open := l.asked
		l.mu.Unlock()
		if open == nil || open.ID != question {
			return nil, refuse("operation %s doesn't ask %q (any more): gbctl operation list shows what it waits for", l.id, bounded(question))
		}
		if len(open.Options) > 0 && !slices.Contains(open.Options, text) {
			return nil, refuse("operation %s: %q isn't an answer: it must be one of %s", l.id, bounded(text), strings.Join(open.Options, ", "))
		}
		if len(text) > maxText || text == "" {
			return nil, refuse("operation %s: an answer has 1 to %d bytes, and this one %d", l.id, maxText, len(text))
		}
		next.Answers = append(next.Answers, answer{Step: open.Step, Question: question, Text: text, By: by, Time: time.Now()})
		return []Event{{Kind: Answered, Step: open.Step, Text: fmt.Sprintf("%s, by %s", text, by)}}, nil
	}, func() {
		open := l.asked
		l.asked = nil
		open.answer <- text // has room for it
	})
}
