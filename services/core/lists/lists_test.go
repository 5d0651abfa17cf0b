package lists

import (
	"slices"
	"strconv"
	"testing"
)

func TestListOfAnother(t *testing.T) {
	t.Parallel()
	if made := Of([]int{3, 1, 2}, strconv.Itoa); !slices.Equal(made, []string{"3", "1", "2"}) {
		t.Errorf("made %q", made)
	}
	if made := Of(nil, strconv.Itoa); made != nil {
		t.Errorf("of nothing: %q, want nil", made)
	}
}

func TestSomeOfAnother(t *testing.T) {
	t.Parallel()
	even := func(n int) (string, bool) { return strconv.Itoa(n), n%2 == 0 }
	if made := Some([]int{4, 1, 2}, even); !slices.Equal(made, []string{"4", "2"}) {
		t.Errorf("made %q", made)
	}
	if made := Some([]int{1, 3}, even); made != nil {
		t.Errorf("of none: %q, want nil", made)
	}
}
