package cache

import (
	"fmt"
	"os"
	"sync"
)

// tryLock takes the flock of a file, which it creates if needed. It returns nil without an error when somebody else is
// in the way.
func tryLock(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	ours, err := flock(f, how)
	if err != nil || !ours {
		f.Close()
		return nil, err
	}
	// The file may have been removed with a pruned result between our open and our lock; then we hold a lock that
	// nobody else will see.
	if !isAt(f, path) {
		f.Close()
		return nil, nil
	}
	return f, nil
}

// isAt reports whether a path still leads to a file that is open.
func isAt(f *os.File, path string) bool {
	here, errHere := f.Stat()
	there, errThere := os.Stat(path)
	return errHere == nil && errThere == nil && os.SameFile(here, there)
}

// share turns an exclusive lock into a shared one. Nobody can hold the lock at that moment, so it doesn't wait.
func share(f *os.File) error {
	_, err := flock(f, shared)
	return err
}

// claims are the results that this process uses: lock path → the open file that holds the shared lock.
var claims struct {
	sync.Mutex // guards the map
	files      map[string]*os.File
}

// claim holds a shared lock until the process ends or releases it. It reports false when a builder or pruner holds the
// lock.
func claim(path string) (bool, error) {
	claims.Lock()
	defer claims.Unlock()
	if held := claims.files[path]; held != nil {
		if isAt(held, path) {
			return true, nil
		}
		held.Close() // the whole cache was removed and came back: our lock is on a file that is gone
		delete(claims.files, path)
	}
	f, err := tryLock(path, shared)
	if err != nil || f == nil {
		return false, err
	}
	if claims.files == nil {
		claims.files = map[string]*os.File{}
	}
	claims.files[path] = f
	return true, nil
}

// release gives up a claim, if there is one.
func release(path string) {
	claims.Lock()
	defer claims.Unlock()
	if held := claims.files[path]; held != nil {
		held.Close()
		delete(claims.files, path)
	}
}
