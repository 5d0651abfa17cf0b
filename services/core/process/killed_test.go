package process

import (
	"fmt"
	"io"
	"strings"
	"testing"
)

// What a process said before it was killed isn't why it ended, and would hide
// that it was killed.
func TestErrorOfTheKilledHasNoLastWords(t *testing.T) {
	read, write := io.Pipe()
	cmd := helper("stubborn")
	cmd.Stdout, cmd.Stderr = write, write
	c, err := New().Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	var word string
	if _, err := fmt.Fscan(read, &word); err != nil {
		t.Fatal(err)
	}
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err == nil || !strings.HasSuffix(err.Error(), "signal: killed") {
		t.Errorf("it said %q; error: %v", word, err)
	}
}
