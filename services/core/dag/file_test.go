package dag

import (
	"context"
	"os"
	"path/filepath"
	"testing"
)

func TestFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "socket")
	f := File(path)
	if got, want := f.String(), `file "`+path+`" to exist`; got != want {
		t.Errorf("it waits for %s", got)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.Wait(ended); err == nil {
		t.Error("it doesn't exist")
	}
	done := make(chan error)
	go func() { done <- f.Wait(t.Context()) }()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}
