package cache

import (
	"fmt"
	"os"
)

// tryLock takes the flock of a file, which it creates if needed. It returns nil without an error when somebody else is
// in the way.
func tryLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	ours, err := flock(f)
	if err != nil || !ours {
		f.Close()
		return nil, err
	}
	// The file may have been removed with a pruned result between our open and our lock; then we hold a lock that
	// nobody else will see.
	here, errHere := f.Stat()
	there, errThere := os.Stat(path)
	if errHere != nil || errThere != nil || !os.SameFile(here, there) {
		f.Close()
		return nil, nil
	}
	return f, nil
}
