package option

import "testing"

func TestDefaultIsForWhatIsLeftOut(t *testing.T) {
	t.Parallel()
	var o struct {
		dir string
		now func() int
		all []int
	}
	for _, value := range []int{1, 2} { // the second one comes too late
		Default(&o.dir, []string{"", "first", "second"}[value])
		Default(&o.now, func() int { return value })
		Default(&o.all, []int{value})
	}
	if o.dir != "first" || o.now() != 1 || len(o.all) != 1 || o.all[0] != 1 {
		t.Errorf("%q, %d, %v", o.dir, o.now(), o.all)
	}
}
