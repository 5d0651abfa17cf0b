package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"gbctl": main})
}

// The scripts are what a person types, and what they must get to see. Each one
// has a cluster of its own: see cluster_test.go for who is in it.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "",
		Setup:               setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "change": change, "links": links, "reader": reader, "bundled": bundled, "serving": serving, "pulled": pulled, "answers": answers,
		},
	})
}
