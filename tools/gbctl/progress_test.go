package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A bar is drawn in place on a terminal. Elsewhere, work that takes long has a line now and then, and other work none.
func TestProgressBar(t *testing.T) {
	for place, wants := range map[bool][]string{
		true:  {"\r\x1b[K[" + strings.Repeat("#", 15) + strings.Repeat(".", 15) + "] n1: 50 of 100\r", "\r\x1b[Kn1: 100 so far\r\x1b[K"},
		false: {"n1: 25 of 100\nn1: 50 of 100\nn1: 75 of 100\n"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var shown bytes.Buffer
			b := &progressBar{w: &shown, place: place, last: time.Now()}
			b.at("n1: 0 of 100", 0, 100)
			for done := uint64(1); done < 100; done++ {
				time.Sleep(lineTime / 25)
				b.at(fmt.Sprintf("n1: %d of 100", done), done, 100)
			}
			if place {
				time.Sleep(redrawTime)
				b.at("n1: 100 so far", 0, 0)
			}
			b.end()
			for _, want := range wants {
				if got := shown.String(); !strings.Contains(got, want) || strings.Contains(got, "n1: 0 of") || !place && got != want {
					t.Errorf("%q", got)
				}
			}
		})
	}
}
